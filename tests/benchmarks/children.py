"""What processes of the tests do in the place of a comparison."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

from benchmarks.harness import Row


def send_one_and_die(connection: Connection) -> None:
    connection.send(Row("step", "before"))
    os._exit(3)


def send_one_and_hang(connection: Connection) -> None:
    connection.send(Row("step", "before"))
    time.sleep(600)
