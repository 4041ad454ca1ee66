# SPDX-License-Identifier: MIT
"""One module per op: schema, reference, gradient, public function."""
