"""How fast jaxshard is beside the others, one file per question.

`make bench` asks all of them; `python -m benchmarks.save --state big --rounds 7` asks one. Every
contender has a process of its own, all save and load the same bits with fsync on, and they take
turns, so that a busy minute of the machine hits all of them. See benchmarks/README.md.
"""
