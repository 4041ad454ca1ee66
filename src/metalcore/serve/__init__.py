# SPDX-License-Identifier: MIT
"""`metalcore serve`: a model behind the HTTP interface of OpenAI, many answers at once."""
