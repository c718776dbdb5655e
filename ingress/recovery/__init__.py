"""Bring archived messages back: `replay` publishes them into any stream, `restore` makes the lost stream again, exactly.

Both read a survey of the archive, plan, check the target, begin under a lease, carry the rows, and record what was done. A
drill does either in a scratch stream, compares, and removes it.
"""
