"""Rows of the task spans."""


def put_together(source, target, marks):
    """The window of text of which spans were taken."""
    spans, mark = {}, None
    for i in target[:-1]:
        mark = i if i >= marks else mark
        spans.setdefault(mark, []).extend([i - 2] if i < marks else [])
    return tuple(j for i in source for j in (spans[i] if i >= marks else [i - 2]))
