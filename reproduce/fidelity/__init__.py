"""Our baselines beside minimal rewrites of the published loops, on the same cached features.

The loops are written from the facts that `tests/methods` lists; nothing of the published code is copied. They keep
what we left out on purpose, such as attention across the test batch, so that its price shows.
"""
