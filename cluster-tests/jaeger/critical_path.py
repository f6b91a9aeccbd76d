"""Jaeger's critical path, as its UI draws it (jaeger-ui, TraceTimelineViewer/CriticalPath): from the end of a span back to
the child that ended last before, and so on. Spans are dicts with id, parent, start, end in nanoseconds."""


def critical_path(spans):
    """The ids of the spans on the path of the one root, last first."""
    by_id = {span["id"]: dict(span) for span in spans}
    children = {span["id"]: [] for span in spans}
    roots = []
    for span in by_id.values():
        (children[span["parent"]] if span["parent"] in by_id else roots).append(span)
    assert len(roots) == 1, f"{len(roots)} roots"
    within(roots[0], children)
    for below in children.values():
        below.sort(key=lambda span: -span["end"])
    path, at, before = [], roots[0], None
    while at is not None:
        last = next((c for c in children[at["id"]] if before is None or c["end"] < before), None)
        end = at["end"] if before is None else before
        start = at["start"] if last is None else last["end"]
        if start != end:
            path.append(at["id"])
        if last is not None:
            at, before = last, None
        else:
            at, before = by_id.get(at["parent"]), at["start"]
    return path


def within(span, children):
    """What sticks out of its parent is cut; what begins behind it does not count."""
    kept = []
    for child in children[span["id"]]:
        if child["start"] >= span["end"] or child["end"] <= span["start"]:
            continue
        child["start"], child["end"] = max(child["start"], span["start"]), min(child["end"], span["end"])
        within(child, children)
        kept.append(child)
    children[span["id"]] = kept
