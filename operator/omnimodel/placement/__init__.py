"""Pure decisions: which model wakes and which goes, which goes idle, and which model belongs into which pool.

No I/O and no clock: time is an argument, bytes are integers, and every answer is a frozen dataclass with a sentence
that says why. The agent and the controllers take a snapshot, ask here, and apply the difference.
"""
