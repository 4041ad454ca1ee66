# SPDX-License-Identifier: MIT
from .cli import app

app(prog_name="mslsim")
