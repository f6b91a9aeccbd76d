"""How a panel and a dashboard of Grafana look in JSON. Knows no metric but those by which clusters and nodes are chosen.

In a query ROUTER, PREFILL, DECODE and NODES stand for label matchers, RATE for Grafana's interval for rates. Panels
flow from left to right in the 24 columns of Grafana's grid; a text alone begins a row.
"""

import json
import re

WORDS = {
    "ROUTER": 'job=~"$job",role="router"',
    "PREFILL": 'job=~"$job",role="prefill",instance=~"$instance"',
    "DECODE": 'job=~"$job",role="decode",instance=~"$instance"',
    "NODES": 'job=~"$job",role=~"prefill|decode",instance=~"$instance"',
    "RATE": "[$__rate_interval]",
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


def promql(text):
    return re.sub("|".join(rf"\b{word}\b" for word in WORDS), lambda found: WORDS[found.group()], text)


def quantiles(histogram, of="ROUTER", by=""):
    """p50, p95 and p99 of a histogram; those of `by` apart."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    # The dots of one of them are enough: they are the same for all three.
    return [
        (
            f"p{percent}{legend}",
            f"histogram_quantile({percent / 100}, sum by ({labels}) (rate({histogram}_bucket{{{of}}}RATE)))",
        )
        for percent in (50, 95, 99)
    ]


def panel(
    kind, title, unit, text, queries, width=8, height=8, *, exemplars=False, stack=False, lines=None, defaults=None
):
    """One panel, without its place. `exemplars` draws the traces of the last query as dots, which lead to Jaeger."""
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "editorMode": "code",
            "range": kind != "table",
            "instant": kind == "table",
            "expr": promql(expr),
            "legendFormat": legend,
            "exemplar": exemplars and number == len(queries) - 1,
            "format": {"heatmap": "heatmap", "table": "table"}.get(kind, "time_series"),
        }
        for number, (legend, expr) in enumerate(queries)
    ]
    custom = {
        "lineWidth": 1,
        "fillOpacity": 25 if stack else 5,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stack else "none", "group": "A"},
    }
    fields = {"unit": unit, "min": 0, **({"custom": custom} if kind == "timeseries" else {}), **(defaults or {})}
    if lines:
        steps = [{"color": "transparent", "value": None}, *({"color": "red", "value": value} for value in lines)]
        fields["thresholds"] = {"mode": "absolute", "steps": steps}
        fields.get("custom", {})["thresholdsStyle"] = {"mode": "dashed"}
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": fields, "overrides": []},
        "options": OPTIONS.get(kind, {}),
        "gridPos": {"w": width, "h": height},
    }


OPTIONS = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
        "orientation": "auto",
        "justifyMode": "auto",
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "yAxis": {"unit": "s", "reverse": False},
        "tooltip": {"show": True},
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5},
        "legend": {"show": False},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
    },
    "state-timeline": {
        "showValue": "never",
        "rowHeight": 0.8,
        "mergeValues": True,
        "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
}


def series(*args, **more):
    return panel("timeseries", *args, **more)


def stat(title, unit, text, expr, width=4):
    return panel("stat", title, unit, text, [("", expr)], width, 4)


def states(title, text, legend, expr, names, width=12):
    """Over time, which of these states each thing was in; `names` are (value, name, colour)."""
    mapping = {str(value): {"text": name, "color": colour, "index": value} for value, name, colour in names}
    defaults = {
        "mappings": [{"type": "value", "options": mapping}],
        "color": {"mode": "fixed", "fixedColor": "green"},
    }
    return panel("state-timeline", title, "none", text, [(legend, expr)], width, 8, defaults=defaults)


def laid_out(panels):
    """The panels with ids and places."""
    x = y = tallest = 0
    placed = []
    for number, item in enumerate(panels, 1):
        if isinstance(item, str):
            item = {"type": "row", "title": item, "collapsed": False, "panels": [], "gridPos": {"w": COLUMNS, "h": 1}}
        width, height = item["gridPos"]["w"], item["gridPos"]["h"]
        if x + width > COLUMNS:
            x, y, tallest = 0, y + tallest, 0
        placed.append({**item, "id": number, "gridPos": {**item["gridPos"], "x": x, "y": y}})
        x, tallest = x + width, max(tallest, height)
    return placed


def variable(name, label, query):
    """Choices out of a label's values; all of them, unless somebody chooses."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def dashboard(uid, title, text, panels):
    variables = [
        {
            "type": "datasource",
            "name": "datasource",
            "label": "Prometheus",
            "query": "prometheus",
            "refresh": 1,
            "current": {},
        },
        variable("job", "Cluster", "label_values(tandem_nodes, job)"),
    ]
    placed = laid_out(panels)
    if "$instance" in json.dumps(placed):
        variables.append(variable("instance", "Node", 'label_values(tandem_queued_tokens{job=~"$job"}, instance)'))
    deaths = {
        "name": "Node deaths",
        "enable": True,
        "iconColor": "red",
        "datasource": SOURCE,
        "titleFormat": "node died",
        "textFormat": "{{reason}}",
        "expr": promql("sum by (reason) (increase(tandem_node_deaths_total{ROUTER}RATE)) > 0"),
    }
    return {
        "uid": uid,
        "title": f"Tandem / {title}",
        "description": text,
        "tags": ["tandem"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "tags": ["tandem"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "title": "Tandem",
            }
        ],
        "annotations": {"list": [deaths]},
        "templating": {"list": variables},
        "panels": placed,
    }
