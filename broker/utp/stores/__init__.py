"""Where cards, definitions and reports lie."""

from __future__ import annotations

import os
from pathlib import Path

from broker.errors import ConfigError
from broker.observe.audit import default_state
from broker.settings import Utp
from broker.utp.stores.base import Stores
from broker.utp.stores.sqlite import SQLite


def make_stores(settings: Utp) -> Stores:
    if settings.store == "sqlite":
        file = SQLite(Path(settings.dsn) if settings.dsn else default_state(os.environ) / "utp.sqlite3")
        return Stores(file, file, file, file)
    try:
        from broker.utp.stores.postgres import Postgres
    except ImportError as error:
        raise ConfigError(f"utp.store = \"postgres\" needs {error.name}: pip install 'toolhost-broker[utp]'") from None
    tables = Postgres(settings.dsn)
    return Stores(tables, tables, tables, tables)
