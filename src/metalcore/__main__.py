# SPDX-License-Identifier: MIT
from metalcore.cli import app

app(prog_name="metalcore")
