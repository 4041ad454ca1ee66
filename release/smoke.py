# SPDX-License-Identifier: MIT
"""A training step, for a fresh install: python release/smoke.py"""

import torch

import metalcore

x = torch.randn(8, 64, requires_grad=True)
weight = torch.nn.Parameter(torch.ones(64))
optimizer = metalcore.MetalAdamW([weight, x], lr=0.1)
with metalcore.trace() as t:
    before = metalcore.rms_norm(x, weight).square().mean()
    before.backward()
    optimizer.step()
    after = metalcore.rms_norm(x, weight).square().mean()
assert after < before, (after, before)
assert not any("reference" in paths for paths in t.paths.values()), t.paths
print(f"loss {before.item():.4f} -> {after.item():.4f} by {t.paths}")
