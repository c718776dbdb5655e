"""Publishing of rows into the target: three publishers, and the judgement of their answers."""
