"""A grammar of bad command lines: valid lines of every command, each broken in one place, by rules over its own options.

`lines(count, seed, folder)` draws them; new commands and options join by themselves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

from autotax.cli.app import COMMANDS, make
from autotax.operators import operators

SIZES = {
    "all-gather-gemm": {"m": "64", "n": "96", "k": "64"},
    "gemm-reduce-scatter": {"m": "64", "n": "96", "k": "64"},
    "flash-decode": {"batch": "2", "q-heads": "8", "kv-heads": "2", "head-dim": "32", "kv-len": "128"},
}
OF_A_PROBLEM = ("tune", "compare", "taxes", "lookup", "trials", "compile")
NO_NUMBERS = [
    "", " ", "many", "1.5", "1e3", "0x10", "nan", "inf", "-", "--", "1,000", "½", "六", "1" * 5000, "\x1b[31m7", "[red]7", "7\n8", "7;8",
    "None", "true", "\udcff",
]  # fmt: skip
NO_SIZES = ["0", "-1", str(2**31), str(2**63), "9" * 30]
NO_WORDS = [
    "", " ", "BF16", "bf17", "bf16,fp16", "../../x", "\x1b[31mbf16", "[red]bf16[/red]", "💥", "x" * 5000, "None", "1", "\udcff", "a\nb",
    "%s", "{0}", "$HOME", "`id`", "'", '"',
]  # fmt: skip
NO_TIMES = ["", " ", "-1", "-10m", "10d", "soon", "inf", "nan", "0", "1h30m", "1e3", "10 m", "٣d", "\x1b[1m", "\udcff"]
NO_DATABASES = [
    "", ":memory:", "nonsense://x/y", "postgresql:/user@host/name", "sqlite://host/x.db", "sqlite:///x.db?mode=ro", "/", "/dev/null/x",
    "://", "sqlite:////", "postgresql+asyncpg://u:p@h/d", "\x1b[31m://x", "a\0b", "~nobody-here/x.db", "\udcff.db",
]  # fmt: skip
NO_FILES = ["", "/", ".", "/dev/null", "/dev/full", "/proc/x", "/nowhere/at/all/x", "a/" * 3000 + "x", "x" * 300, "a\0b"]
NO_MODULES = ["", "nothing.like.it", "nowhere.py", "/", "os.path.", ".", "a b", "\x1b[31m", "1", "/dev/null", "json;import os", "\udcff"]
NO_TOKENS = ["", " ", ",", "1,,2", "0", "-1", "1...", "...8", "8...1", "1....8", "1,16,64..8192", "1e3", "9" * 10, "八", "\x1b[1m", "\udcff"]
NO_SHAPES = {
    "cut short": b"[[all-gather-gemm]\nm = 64",
    "of another operator": b'[[all-gather-gemm]]\nop = "flash-decode"\nm = 64\nn = 96\nk = 64',
    "with a huge number": b"[[all-gather-gemm]]\nn = 96\nk = 64\nm = 0x" + b"f" * 9000,
    "with a long key": b'[[all-gather-gemm]]\n"' + b"k" * 9000 + b'" = 1',
    "of too many": b"all-gather-gemm = [" + b"{m = 64}, " * 10_001 + b"]",
    "with a mark and nothing": b"\xef\xbb\xbf",
    "with half a character": "# é".encode("utf-16")[:-1],
}
_SIZES = '"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024'
NO_MODELS = {
    "cut short": '{"model_type": "llama"',
    "an array": "[]",
    "without a family": f"{{{_SIZES}}}",
    "of no family": f'{{"model_type": "lamma", {_SIZES}}}',
    "a family that is a number": f'{{"model_type": 3, {_SIZES}}}',
    "with a state": f'{{"model_type": "mamba2", {_SIZES}}}',
    "heads that do not divide": f'{{"model_type": "llama", {_SIZES.replace(": 8", ": 6")}}}',
    "a size of zero": f'{{"model_type": "llama", {_SIZES.replace("1024", "0")}}}',
    "a size that is text": f'{{"model_type": "llama", {_SIZES.replace("1024", chr(34) + "1024" + chr(34))}}}',
    "wrapped in a number": '{"model_type": "llava", "text_config": 3}',
    "wrapped deeply": '{"text_config": ' * 3000 + "{}" + "}" * 3000,
}
WORDS = {"dtype", "shard", "output", "mode", "l2", "sampler", "backend", "target", "on", "variants"}


@dataclass(frozen=True)
class Line:
    """A command line that must end with exit code 2. `rule` says how it was broken."""

    rule: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.rule}: {' '.join(repr(argument)[:80] for argument in self.arguments)}"


@dataclass(frozen=True)
class Option:
    name: str
    number: bool
    flag: bool


@cache
def options() -> dict[str, list[Option]]:
    """The options of each command, as the parser has them."""
    app = typer.main.get_command(make([]))
    by_command = {}
    for name in COMMANDS:
        command: Any = app
        for word in name.split():
            command = command.commands[word]
        by_command[name] = [
            Option(parameter.opts[0].removeprefix("--"), parameter.metavar == "INT", bool(getattr(parameter, "is_flag", False)))
            for parameter in command.params
            if parameter.opts[0].startswith("--")
        ]
    return by_command


def write_bad_files(folder: Path) -> None:
    """Writes the files that lines name: of shapes, of models, and a good model."""
    for name, content in NO_SHAPES.items():
        (folder / f"{name}.toml").write_bytes(content)
    for name, text in NO_MODELS.items():
        (folder / f"{name}.json").write_text(text)
    (folder / "model.json").write_text(f'{{"model_type": "llama", {_SIZES}}}')


def valid(command: str, draw: random.Random, folder: Path) -> list[str]:
    """A line that the command would accept, apart from files that are not there."""
    words = command.split()
    if command in OF_A_PROBLEM:
        op = draw.choice(list(SIZES))
        target = ["--target", "cuda:90"] if command == "compile" else []
        return [*words, op, *(part for name, value in SIZES[op].items() for part in (f"--{name}", value)), *target]
    more = {"export": ["-o", str(folder / "export.json")], "report": ["-o", str(folder / "report.html")], "import": []}
    return [*words, *more.get(command, [])]


def lines(count: int, seed: int, folder: Path) -> list[Line]:
    """`count` different lines: one of every rule, then of rules at random. The same for the same seed."""
    draw, known, sample = random.Random(seed), options(), {}
    rules = list(_RULES.items())
    while len(sample) < count:
        name, rule = rules[len(sample)] if len(sample) < len(rules) else draw.choice(rules)
        command = draw.choice(list(COMMANDS))
        if broken := rule(command, known[command], draw, folder):
            sample[broken] = Line(name, broken)
    return list(sample.values())



def _unknown_option(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    name = draw.choice(there).name
    at = draw.randrange(len(name))
    typo = draw.choice([name[:at] + name[at + 1 :], name + name[-1], name[:at] + "-" + name[at:], name.upper(), name + "\x1b[31m"])
    if typo in {option.name for option in there} | {"help", ""} or any(f"--no-{typo}" == option.name for option in there):
        return ()
    return (*valid(command, draw, folder), f"--{typo}", *draw.choice([[], ["1"]]))


def _option_without_value(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    return (*valid(command, draw, folder), f"--{draw.choice([option for option in there if not option.flag]).name}")


def _flag_with_value(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    flags = [option for option in there if option.flag]
    if not flags:
        return ()
    flag = draw.choice(flags)
    return (*valid(command, draw, folder), f"--{flag.name}={draw.choice(['yes', '1', '', 'true'])}")


def _no_number(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    numbers = [option for option in there if option.number]
    if not numbers:
        return ()
    return (*valid(command, draw, folder), f"--{draw.choice(numbers).name}={draw.choice(NO_NUMBERS)}")


def _no_size(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    if command not in OF_A_PROBLEM:
        return ()
    line = valid(command, draw, folder)
    own = [at for at, word in enumerate(line) if word.startswith("--") and word != "--target"]
    at = draw.choice(own)
    line[at + 1] = draw.choice(NO_SIZES[:2] if command == "trials" else NO_SIZES)
    return tuple(line)


def _lacking_size(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    if command not in OF_A_PROBLEM:
        return ()
    line = valid(command, draw, folder)
    at = draw.choice([at for at, word in enumerate(line) if word.startswith("--") and word != "--target"])
    return (*line[:at], *line[at + 2 :])


def _no_word(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    names = {option.name for option in there}
    words = sorted((WORDS & names) - ({"output"} if command in ("export", "report") else set()))
    line = valid(command, draw, folder)
    foreign = {"shard": "all-gather-gemm", "output": "flash-decode"}
    usable = [word for word in words if word not in foreign or foreign[word] in line]
    if not usable or (command == "fleet tune" and not set(usable) & {"on"}):
        return ()
    chosen = "on" if command == "fleet tune" else draw.choice(usable)
    allowed = {"variants": {"'", '"'}}
    value = draw.choice([word for word in NO_WORDS if word not in allowed.get(chosen, ())])
    return (*line, f"--{chosen}={value}")


def _no_time(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    if command != "tune":
        return ()
    return (*valid(command, draw, folder), f"--timeout={draw.choice(NO_TIMES)}")


def _no_skew(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    if command not in ("tune", "compare", "taxes", "lookup"):
        return ()
    return (*valid(command, draw, folder), f"--skew={draw.choice(['', ' ', 'some', 'nan', 'inf', '-inf', '-1', '1e300', '0x1', '1,5'])}")


def _no_database(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    if command in ("compile", "fleet tune", "doctor"):
        return ()
    line = valid(command, draw, folder)
    if command == "import":
        line.append(str(folder / "good.json"))
    return (*line, f"--db={draw.choice([url for url in NO_DATABASES if url != '/dev/null/x' or command in ('tune', 'import')])}")


def _no_file(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    bad = draw.choice(NO_FILES)
    if command in ("tune", "compare", "taxes"):
        return (*command.split(), f"--shapes={bad}")
    if command == "import":
        return ("import", bad)
    if command == "report":
        return (*valid(command, draw, folder), bad)
    return ("export", "-o", bad, "--db", str(folder / "full.db")) if command == "export" else ()


def _no_shapes(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    if command not in ("tune", "compare", "taxes"):
        return ()
    return (command, "--shapes", str(folder / f"{draw.choice(list(NO_SHAPES))}.toml"))


def _no_model(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    if command != "tune":
        return ()
    more = draw.choice([[], ["--dry-run"], ["--train"], ["--split"]])
    return ("tune", "--model", str(folder / f"{draw.choice(list(NO_MODELS))}.json"), "--tp", "2", "--tokens", "8", *more)


def _no_tokens(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    return ("tune", "--model", str(folder / "model.json"), "--tp", "2", f"--tokens={draw.choice(NO_TOKENS)}") if command == "tune" else ()


def _no_plan(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    """A choice of `tune` that it does not know."""
    if command != "tune":
        return ()
    name = draw.choice(["effort", "for", "hardware"])
    more = {"effort": valid(command, draw, folder)[1:], "for": ["--model", str(folder / "model.json"), "--tp", "2"], "hardware": ["--dry-run"]}
    return ("tune", *more[name], f"--{name}={draw.choice(NO_WORDS)}")


def _no_module(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    return (*valid(command, draw, folder), "--load", draw.choice(NO_MODULES))


def _no_operator(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    if command not in (*OF_A_PROBLEM, "export"):
        return ()
    line = valid(command, draw, folder)
    name = draw.choice([*(word for word in NO_WORDS if word[:1] != "-"), "all-gather", "allgathergemm", "flash_decode"])
    return (*line, name) if command == "export" else (command, name, *line[2:])


def _too_many(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    if command in ("export", "report", "new operator", "new variant"):  # the latter two take any name
        return ()
    first = [str(folder / "good.json")] if command == "import" else []
    more = () if command in ("refresh", "winners") else operators()  # these two take names of operators
    return (*valid(command, draw, folder), *first, draw.choice([*more, "one-more", "", "💥"]))


def _others_option(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    own = {option.name for option in there} | {"json"}  # which asks for a document of the mistake on stdout, wherever it is given
    foreign = sorted({other.name for all_of in options().values() for other in all_of} - own)
    return (*valid(command, draw, folder), f"--{draw.choice(foreign)}", "1") if foreign else ()


def _size_of_another_operator(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    if command not in OF_A_PROBLEM:
        return ()
    line = valid(command, draw, folder)
    foreign = sorted({name for op, sizes in SIZES.items() if op != line[1] for name in sizes} - set(SIZES[line[1]]))
    return (*line, f"--{draw.choice(foreign)}", "8")


def _no_command(command: str, there: list[Option], draw: random.Random, folder: Path) -> tuple[str, ...]:
    words = command.split()
    at = draw.randrange(len(words[0]))
    typo = draw.choice([words[0][:at] + words[0][at + 1 :], words[0].upper(), words[0] + "s", *NO_WORDS])
    return () if typo in {name.split()[0] for name in COMMANDS} or typo.startswith("-") else (typo, *valid(command, draw, folder)[1:])


_RULES = {
    "an unknown option": _unknown_option,
    "an option without its value": _option_without_value,
    "a flag with a value": _flag_with_value,
    "no number": _no_number,
    "no size": _no_size,
    "a size that lacks": _lacking_size,
    "no word": _no_word,
    "no time": _no_time,
    "no skew": _no_skew,
    "no database": _no_database,
    "no file": _no_file,
    "no shapes": _no_shapes,
    "no model": _no_model,
    "no tokens": _no_tokens,
    "no plan": _no_plan,
    "no module": _no_module,
    "no operator": _no_operator,
    "too many arguments": _too_many,
    "an option of another command": _others_option,
    "a size of another operator": _size_of_another_operator,
    "no command": _no_command,
}


def rules() -> Iterator[str]:
    """The names of all rules."""
    yield from _RULES
