"""What a block of a model computes, recorded as a graph while its own forward runs, and run again as a program.

`record.py` makes the graph, `signature.py` says for which calls it holds, `edit.py` is what patterns read and change
it with, `program.py` turns it back into a function.
"""
