"""Bring archived messages back: `replay` publishes them into any stream, `restore` makes the lost stream again.

Both survey the archive, plan, check the target, begin under a lease, carry the rows, and record what was done. A drill
does either in a scratch stream, compares it with the archive, and removes it.
"""
