"""The emulated machine itself, on listings written by hand: what its memory promises, and that it can show a fault."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.amd.listing import read
from tests.amd.machine import Machine, Program
from tests.amd.memory import Memory, Store, Wild
from tests.amd.wave import Array

END = """
    .section .rodata
    .amdhsa_user_sgpr_count 2
    .amdhsa_system_sgpr_workgroup_id_x 1
    .amdhsa_kernarg_size 64
amdhsa.kernels:
    .args:
    .max_flat_workgroup_size: 64
"""
HEAD = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0      ; the data, and the flag, of rank 1
    s_waitcnt lgkmcnt(0)
    v_lshlrev_b32_e32 v1, 2, v0
    v_mov_b32_e32 v2, 0
    v_mov_b32_e32 v3, 1
"""
SEND = """
    v_mov_b32_e32 v4, 7
    global_store_dword v1, v4, s[4:5]
    s_waitcnt vmcnt(0)
    buffer_wbl2 sc0 sc1
    s_waitcnt vmcnt(0)
    s_mov_b64 exec, 1
    global_atomic_add v2, v3, s[6:7] sc1
    s_mov_b64 exec, -1
    s_movk_i32 s8, 300
.Lgoing_on:
    s_sub_u32 s8, s8, 1
    s_cmp_lg_u32 s8, 0
    s_cbranch_scc1 .Lgoing_on
    s_endpgm
"""
RECEIVE = """
.Lpoll:
    global_load_dword v5, v2, s[6:7] sc0 sc1
    s_waitcnt vmcnt(0)
    v_readfirstlane_b32 s8, v5
    s_cmp_eq_u32 s8, 0
    s_cbranch_scc1 .Lpoll
    buffer_inv sc0 sc1
    global_load_dword v6, v1, s[4:5]
    s_load_dwordx2 s[4:5], s[0:1], 0x10
    s_waitcnt vmcnt(0) lgkmcnt(0)
    global_store_dword v1, v6, s[4:5]
    s_endpgm
"""


def _sent(seed: int, send: str, receive: str = RECEIVE) -> list[int]:
    """Rank 0 sends 64 words; returns the words that rank 1 reads."""
    memory = Memory(seed)
    machine = Machine(2, memory, seed)
    data, flag, out = (torch.zeros(64, dtype=torch.int32) for _ in range(3))
    for tensor in (data, flag, out):
        memory.admit(tensor)
    arguments: Array = np.array([data.data_ptr(), flag.data_ptr(), out.data_ptr(), *[0] * 5], np.int64).view(np.uint8)
    memory.admit_range(int(arguments.ctypes.data), arguments.nbytes, arguments)

    def run(rank: int) -> None:
        machine.launch(rank, Program(read(HEAD + (send, receive)[rank] + END)), 1, arguments, 0)
        machine.leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    machine.run()
    machine.check()
    result: list[int] = out.tolist()
    return result


SEEDS = range(12)


def test_a_release_that_is_waited_for_is_never_ahead_of_its_data() -> None:
    assert all(_sent(seed, SEND) == [7] * 64 for seed in SEEDS)


@pytest.mark.parametrize(
    "lacking",
    [
        SEND.replace("sc0 sc1\n    s_waitcnt vmcnt(0)", "sc0 sc1"),
        SEND.replace("    buffer_wbl2 sc0 sc1\n", ""),
        SEND.replace("s[4:5]\n    s_waitcnt vmcnt(0)", "s[4:5]"),
    ],
    ids=["the wait for the write-back", "the write-back", "the wait for the store"],
)
def test_a_release_that_lacks_a_part_can_be_ahead_of_its_data(lacking: str) -> None:
    assert lacking != SEND
    assert any(_sent(seed, lacking) != [7] * 64 for seed in SEEDS)


def test_a_line_that_was_read_before_stays_old_without_an_invalidation() -> None:
    early = "    global_load_dword v6, v1, s[4:5]\n" + RECEIVE
    stale = [_sent(seed, SEND, early.replace("    buffer_inv sc0 sc1\n", "")) for seed in SEEDS]
    assert any(words != [7] * 64 for words in stale)
    assert all(_sent(seed, SEND, early) == [7] * 64 for seed in SEEDS)


def test_an_access_outside_of_all_tensors_is_an_error() -> None:
    memory = Memory(0)
    die = memory.die()
    tensor = torch.zeros(16, dtype=torch.int32)
    memory.admit(tensor)
    inside = np.array([tensor.data_ptr() + 60])
    assert memory.load(die, inside, 4, past=False).tolist() == [[0] * 4]
    with pytest.raises(Wild, match="outside all tensors"):
        memory.load(die, inside + 4, 4, past=False)
    with pytest.raises(Wild):
        memory.store(Store(die, inside - 64, np.zeros((1, 4), np.uint8), through=False))


def test_dies_of_a_gpu_see_each_others_stores_after_a_write_back_only() -> None:
    memory = Memory(0)
    first, second = memory.die(), memory.die()
    tensor = torch.zeros(16, dtype=torch.int32)
    memory.admit(tensor)
    at = np.array([tensor.data_ptr()])
    memory.store(Store(first, at, np.array([[1, 2, 3, 4]], np.uint8), through=False))
    assert memory.load(first, at, 4, past=False).tolist() == [[1, 2, 3, 4]]
    assert memory.load(second, at, 4, past=True).tolist() == [[0, 0, 0, 0]]
    last = memory.begin_write_back(first)
    assert last
    assert memory.load(second, at, 4, past=True).tolist() == [[0, 0, 0, 0]]
    memory.end_write_back(first, last)
    assert memory.load(second, at, 4, past=True).tolist() == [[1, 2, 3, 4]]


def test_an_instruction_that_is_not_known_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="v_dance_f32 v0, v1"):
        Program(read("    v_dance_f32 v0, v1\n" + END))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("v_perm_b32 v2, v0, v1, s4", 0x55443322),
        ("v_bfe_u32 v2, v0, 8, 12", 0x766),
        ("v_bfe_i32 v2, v0, 4, 4", 0x5),
        ("v_mul_hi_u32 v2, v0, v1", 0x88776655 * 0x44332211 >> 32),
        ("v_alignbit_b32 v2, v0, v1, 8", 0x55443322),
        ("v_mbcnt_lo_u32_b32 v2, -1, 0", 0),
        ("v_and_or_b32 v2, v0, 15, v1", 0x44332215),
        ("v_ashrrev_i32_e32 v2, 28, v0", 0xFFFFFFF8),
        ("v_cvt_f16_f32_e32 v2, 1.0", 0x3C00),
        ("v_pack_b32_f16 v2, v0, v1", 0x22116655),
        ("v_add_u32_sdwa v2, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:WORD_1", 0x4488),
        ("v_add_co_u32_e32 v2, vcc, -1, v0", 0x88776654),
        ("v_cndmask_b32_e64 v2, v0, v1, -1", 0x44332211),
        ("v_med3_i32 v2, 5, 1, 3", 3),
        ("s_bitset1_b32 s4, 31\nv_mov_b32_e32 v2, s4", 0x84030201),
        ("s_bitset0_b32 s4, 0\nv_mov_b32_e32 v2, s4", 0x04030200),
        ("s_bfm_b32 s4, 8, 4\nv_mov_b32_e32 v2, s4", 0xFF0),
        ("s_bfe_u32 s4, s4, 0x80010\nv_mov_b32_e32 v2, s4", 0x03),
        ("s_flbit_i32_b32 s4, s4\nv_mov_b32_e32 v2, s4", 5),
        ("s_ff1_i32_b64 s4, exec\nv_mov_b32_e32 v2, s4", 0),
        ("v_xad_u32 v2, v0, v1, 1", (0x88776655 ^ 0x44332211) + 1),
    ],
)
def test_instructions_do_what_the_manual_says(line: str, expected: int) -> None:
    """On 0x88776655 and 0x44332211, with 0x04030201 in s4."""
    memory = Memory(0)
    machine = Machine(1, memory, 0)
    out = torch.zeros(64, dtype=torch.int32)
    memory.admit(out)
    arguments: Array = np.array([out.data_ptr(), *[0] * 7], np.int64).view(np.uint8)
    memory.admit_range(int(arguments.ctypes.data), arguments.nbytes, arguments)
    code = f"""
    s_load_dwordx2 s[6:7], s[0:1], 0x0
    s_waitcnt lgkmcnt(0)
    s_mov_b32 s4, 0x04030201
    v_lshlrev_b32_e32 v9, 2, v0
    v_mov_b32_e32 v0, 0x88776655
    v_mov_b32_e32 v1, 0x44332211
    {line}
    global_store_dword v9, v2, s[6:7]
    s_endpgm
"""

    def run() -> None:
        machine.launch(0, Program(read(code + END)), 1, arguments, 0)
        machine.leave()

    threading.Thread(target=run, daemon=True).start()
    machine.run()
    machine.check()
    assert int(out[0]) & 0xFFFFFFFF == expected
