"""STATUSES of trials and runs, listed once."""

from __future__ import annotations

INVALIDITY = {
    "ok": "correct",
    "pruned": "correct",
    "infeasible": "constraints",
    "compile_error": "compile",
    "wrong_result": "correctness",
    "hang": "timeout",
    "out_of_resources": "runtime",
    "crash": "runtime",
}
"""T4's name for each status of a trial, from harmless to grave. Where ranks differ, the gravest is the status of the trial.
A rank that could not go on, for want of memory or otherwise, comes last: its peers wait for it in vain or read what it has not
written.
"""
TRIAL_STATUSES = tuple(INVALIDITY)
RUN_STATUSES = ("running", "done", "interrupted", "failed")
ENDINGS = RUN_STATUSES[1:]
