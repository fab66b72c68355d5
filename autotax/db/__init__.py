"""Storage: every trial and every winner, in SQLite or any database that SQLAlchemy reaches.

`Store` writes and reads records. `autotax.db.lookup` finds the config to run, without access to the database once it is loaded.
"""

from autotax.db.connection import DatabaseBusy, failing
from autotax.db.records import RunRecord, TrialRecord, WinnerRecord
from autotax.db.store import Store
from autotax.db.url import default_url, resolve_url

__all__ = ["DatabaseBusy", "RunRecord", "Store", "TrialRecord", "WinnerRecord", "default_url", "failing", "resolve_url"]
