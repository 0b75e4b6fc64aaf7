"""The tables of a log in SQLite, and the migrations from earlier versions."""

from __future__ import annotations

APPLICATION_ID = 0x46415253
"""``PRAGMA application_id`` of the file: "FARS"."""

# AUTOINCREMENT: a row number is never used again, even after the newest rows have been deleted.
VERSION_1 = (
    """
CREATE TABLE finished_requests (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    request_id TEXT NOT NULL UNIQUE,
    replica TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    prompt_len INTEGER NOT NULL,
    output_len INTEGER NOT NULL,
    max_new_tokens INTEGER NOT NULL,
    finish_reason TEXT NOT NULL,
    received_at REAL NOT NULL,
    ttft_s REAL,
    jct_s REAL NOT NULL
)""",
    f"PRAGMA application_id = {APPLICATION_ID}",
)

# A row of ``examples`` stands for a request whose end and forecast are both known. It gets its number when the second
# of them is written, so that a reader that continues after its last row also finds late examples.
VERSION_2 = (
    """
CREATE TABLE forecasts (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    request_id TEXT NOT NULL UNIQUE,
    made_at REAL NOT NULL,
    source TEXT NOT NULL,
    version INTEGER NOT NULL,
    mean REAL NOT NULL,
    quantiles TEXT NOT NULL,
    rank REAL,
    feature_set TEXT NOT NULL,
    features BLOB NOT NULL
)""",
    """
CREATE TABLE finished_batches (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    batch_id TEXT NOT NULL UNIQUE,
    worker TEXT NOT NULL,
    num_requests INTEGER NOT NULL,
    batch_len INTEGER NOT NULL,
    generation_len INTEGER NOT NULL,
    predicted_len INTEGER NOT NULL,
    estimated_time_s REAL NOT NULL,
    serving_time_s REAL NOT NULL,
    finished_at REAL NOT NULL
)""",
    "CREATE TABLE examples (row INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE)",
    """
CREATE TRIGGER forecast_of_finished AFTER INSERT ON forecasts
WHEN EXISTS (SELECT 1 FROM finished_requests WHERE request_id = NEW.request_id)
BEGIN INSERT INTO examples (request_id) VALUES (NEW.request_id); END""",
    """
CREATE TRIGGER finished_with_forecast AFTER INSERT ON finished_requests
WHEN EXISTS (SELECT 1 FROM forecasts WHERE request_id = NEW.request_id)
BEGIN INSERT INTO examples (request_id) VALUES (NEW.request_id); END""",
    """
CREATE TRIGGER forecast_dropped AFTER DELETE ON forecasts
BEGIN DELETE FROM examples WHERE request_id = OLD.request_id; END""",
    """
CREATE TRIGGER finished_dropped AFTER DELETE ON finished_requests
BEGIN DELETE FROM examples WHERE request_id = OLD.request_id; END""",
    """
CREATE TABLE artefact_kinds (kind TEXT PRIMARY KEY, last_version INTEGER NOT NULL, current_version INTEGER)""",
    """
CREATE TABLE artefacts (
    kind TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at REAL NOT NULL,
    score REAL,
    num_examples INTEGER NOT NULL,
    note TEXT NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (kind, version)
)""",
)

# Traces are found by the beginning of their ids, through the index of the unique column.
VERSION_3 = (
    """
CREATE TABLE traces (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    trace_id TEXT NOT NULL UNIQUE,
    request_id TEXT NOT NULL,
    choice INTEGER NOT NULL,
    owner BLOB NOT NULL,
    source TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    ended INTEGER NOT NULL,
    num_left_out INTEGER NOT NULL,
    decisions BLOB NOT NULL
)""",
)

# What clients leave for a while: files, batches, and what batches have brought.
VERSION_4 = (
    """
CREATE TABLE kept_objects (
    kind TEXT NOT NULL,
    object_id TEXT NOT NULL,
    owner TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    revision INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    record BLOB NOT NULL,
    PRIMARY KEY (kind, object_id)
)""",
    "CREATE INDEX kept_by_owner ON kept_objects (kind, owner, created_at, object_id)",
    """
CREATE TABLE kept_parts (
    kind TEXT NOT NULL,
    object_id TEXT NOT NULL,
    part INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (kind, object_id, part)
)""",
)

# What a counterfactual needs of each request.
VERSION_5 = (
    "ALTER TABLE finished_requests ADD COLUMN priority INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE finished_requests ADD COLUMN tenant TEXT NOT NULL DEFAULT ''",
)

STEPS = (VERSION_1, VERSION_2, VERSION_3, VERSION_4, VERSION_5)
"""The statements that migrate a file from each version to the next; an empty file has version 0."""

SQL_SCHEMA_VERSION = len(STEPS)
"""``PRAGMA user_version`` of the file."""
