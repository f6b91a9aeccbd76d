#!/usr/bin/env python3
"""Writes Grafana's dashboards, one JSON file each, into grafana/dashboards/. Change them here and run this again.

A panel says what it shows: a title, a unit, a sentence, and queries as (legend, PromQL), in the words of `panels.py`.
The file is long because it is a list of panels, some eight lines each.
"""

import json
import pathlib

from panels import dashboard, panel, quantiles, series, stat, states

DASHBOARDS = pathlib.Path(__file__).resolve().parent / "grafana" / "dashboards"

OVERVIEW = [
    stat(
        "Requests",
        "reqps",
        "Requests that ended, whatever became of them.",
        "sum(rate(tandem_requests_total{ROUTER}RATE))",
    ),
    stat(
        "Goodput",
        "reqps",
        "Answers whose first token and whose mean time per further token kept the router's --ttft-objective-ms and"
        " --tpot-objective-ms.",
        'sum(tandem:goodput:rate1m{job=~"$job"})',
    ),
    stat(
        "TTFT misses, last hour",
        "percentunit",
        "Share of requests whose first token came later than the objective or never. The alerts begin at 1 %.",
        'max(tandem:ttft_misses:ratio1h{job=~"$job"})',
    ),
    stat(
        "Output tokens",
        "short",
        "Tokens a second that decode nodes generate.",
        'sum(rate(vllm:generation_tokens_total{job=~"$job",role="decode"}RATE))',
    ),
    stat(
        "Prompt tokens",
        "short",
        "Tokens a second of the prompts of requests that got a first token, cached ones included.",
        "sum(rate(vllm:prompt_tokens_total{ROUTER}RATE))",
    ),
    stat(
        "Alerts that fire",
        "none",
        "See the dashboard Failures.",
        'count(ALERTS{alertname=~"Tandem.+",alertstate="firing"}) or vector(0)',
    ),
    "Latency, as clients see it",
    series(
        "TTFT",
        "s",
        "Time to first token: request accepted to first token sent.",
        quantiles("tandem_ttft_seconds"),
        exemplars=True,
    ),
    series(
        "TPOT",
        "s",
        "Time per output token: of each answer the mean after its first token.",
        quantiles("vllm:request_time_per_output_token_seconds"),
        exemplars=True,
    ),
    series(
        "ITL",
        "s",
        "Inter-token latency: every gap between two tokens of an answer. A dot is the longest gap of its answer.",
        quantiles("tandem_itl_seconds"),
        exemplars=True,
    ),
    panel(
        "heatmap",
        "TTFT, all requests",
        "none",
        "Each column is an interval; the darker, the more requests had that TTFT.",
        [("{{le}}", "sum by (le) (increase(tandem_ttft_seconds_bucket{ROUTER}RATE))")],
        exemplars=True,
    ),
    series(
        "Where the first token's time goes",
        "s",
        "Means of the phases of answered requests. The transfer is only what the prefill did not hide; it comes after"
        " the first token.",
        [
            (name, f"sum(rate({metric}_sum{{ROUTER}}RATE)) / (sum(rate({metric}_count{{ROUTER}}RATE)) > 0)")
            for name, metric in [
                ("queue", "vllm:request_queue_time_seconds"),
                ("route", "tandem_route_seconds"),
                ("prefill", "vllm:request_prefill_time_seconds"),
                ("exposed transfer", "tandem_transfer_exposed_seconds"),
            ]
        ],
        stack=True,
    ),
    series(
        "End to end", "s", "Request accepted to answer complete.", quantiles("tandem_e2e_seconds"), exemplars=True
    ),
    "Throughput",
    series(
        "Requests by outcome",
        "reqps",
        "",
        [("{{outcome}}", "sum by (outcome) (rate(tandem_requests_total{ROUTER}RATE))")],
        stack=True,
    ),
    series(
        "Answers by objective",
        "reqps",
        "Whole answers. met: goodput. The others missed the TTFT objective, the TPOT objective, or both.",
        [("{{objectives}}", "sum by (objectives) (rate(tandem_answers_total{ROUTER}RATE))")],
        stack=True,
    ),
    series(
        "Requests in the router",
        "short",
        "",
        [
            ("running", "sum(tandem_inflight_requests{ROUTER})"),
            ("waiting for admission", "sum(tandem_queued_requests{ROUTER})"),
        ],
    ),
    series(
        "Prompt tokens a second",
        "short",
        "By where their KV came from: computed, or found in the prefix cache of the node that computes the prompt.",
        [
            (
                "computed",
                (
                    "sum(rate(vllm:prefix_cache_queries_total{ROUTER}RATE)) -"
                    " sum(rate(vllm:prefix_cache_hits_total{ROUTER}RATE))"
                ),
            ),
            ("cached", "sum(rate(vllm:prefix_cache_hits_total{ROUTER}RATE))"),
        ],
        stack=True,
    ),
    series(
        "Output tokens a second",
        "short",
        "By decode node.",
        [("{{instance}}", 'sum by (instance) (rate(vllm:generation_tokens_total{job=~"$job",role="decode"}RATE))')],
        stack=True,
    ),
    series(
        "Lengths",
        "short",
        "Medians of prompts and answers, in tokens.",
        [
            ("prompt", "histogram_quantile(0.5, sum by (le) (rate(vllm:request_prompt_tokens_bucket{ROUTER}RATE)))"),
            (
                "answer",
                "histogram_quantile(0.5, sum by (le) (rate(vllm:request_generation_tokens_bucket{ROUTER}RATE)))",
            ),
        ],
    ),
]

HANDOFF = [
    stat(
        "Hand-offs",
        "ops",
        "KV hand-offs a second that a decode node verified.",
        'sum(rate(tandem_handoffs_total{ROUTER,state="verified"}RATE))',
        6,
    ),
    stat(
        "KV moved",
        "Bps",
        "Bytes of KV that left prefill nodes, a second.",
        'sum(rate(tandem_kv_bytes_total{PREFILL,direction="sent"}RATE))',
        6,
    ),
    stat(
        "Hidden",
        "percentunit",
        "Share of the bytes that left while their prompt was still computed.",
        'sum(rate(tandem_kv_pushed_bytes_total{PREFILL,part="hidden"}RATE)) /'
        " (sum(rate(tandem_kv_pushed_bytes_total{PREFILL}RATE)) > 0)",
        6,
    ),
    stat(
        "Not delivered",
        "percentunit",
        "Share of the hand-offs that failed at the receiver or on the way. Their requests go on.",
        "sum(rate(tandem_handoffs_undelivered_total{PREFILL}RATE)) /"
        ' ((sum(rate(tandem_handoffs_total{PREFILL,state="sent"}RATE)) +'
        " sum(rate(tandem_handoffs_undelivered_total{PREFILL}RATE))) > 0)",
        6,
    ),
    "Time",
    series(
        "Exposed transfer",
        "s",
        "First token to verified KV: what the answer waits for because the prefill did not hide it.",
        quantiles("tandem_transfer_exposed_seconds"),
        exemplars=True,
    ),
    series(
        "Whole copy",
        "s",
        "First byte posted to last byte landed, hidden or not.",
        quantiles("vllm:nixl_xfer_time_seconds"),
        exemplars=True,
    ),
    series(
        "Hand-off gap",
        "s",
        "First to second token, as the client sees it.",
        quantiles("tandem_handoff_gap_seconds"),
        exemplars=True,
    ),
    series(
        "Time of hand-offs, hidden and exposed",
        "s",
        "Of each delivered hand-off, in the mean: from its first frame to the end of the prefill, and from there to"
        " the receiver's receipt.",
        [
            (
                "{{part}}",
                (
                    "sum by (part) (rate(tandem_kv_transfer_seconds_total{PREFILL}RATE)) / ignoring (part) group_left"
                    ' () (sum(rate(tandem_handoffs_total{PREFILL,state="sent"}RATE)) > 0)'
                ),
            )
        ],
        stack=True,
    ),
    series(
        "Speed of a copy",
        "Bps",
        "Bytes of verified hand-offs over the time of their copies. A copy that waits for the prefill to compute the"
        " next piece is slow by this.",
        [
            (
                "copies",
                (
                    "sum(rate(vllm:nixl_bytes_transferred_sum{ROUTER}RATE)) /"
                    " (sum(rate(vllm:nixl_xfer_time_seconds_sum{ROUTER}RATE)) > 0)"
                ),
            )
        ],
    ),
    series(
        "Speed of the links",
        "Bps",
        "What each prefill node measured of its links to receivers: 8 Gbit/s are 1 GB/s. Nothing, before a hand-off"
        " that waited for its link.",
        [("{{instance}}", "tandem_kv_link_bytes_per_second{PREFILL} > 0")],
    ),
    "Bytes",
    series(
        "KV sent",
        "Bps",
        "By prefill node.",
        [("{{instance}}", 'sum by (instance) (rate(tandem_kv_bytes_total{PREFILL,direction="sent"}RATE))')],
        stack=True,
    ),
    series(
        "KV received",
        "Bps",
        "By decode node.",
        [("{{instance}}", 'sum by (instance) (rate(tandem_kv_bytes_total{DECODE,direction="received"}RATE))')],
        stack=True,
    ),
    series(
        "Bytes, hidden and exposed",
        "Bps",
        "By whether the prompt was still computed when they left.",
        [("{{part}}", "sum by (part) (rate(tandem_kv_pushed_bytes_total{PREFILL}RATE))")],
        stack=True,
    ),
    series(
        "Size of a hand-off",
        "bytes",
        "",
        [
            (
                f"p{percent}",
                (
                    f"histogram_quantile({percent / 100}, sum by (le)"
                    " (rate(vllm:nixl_bytes_transferred_bucket{ROUTER}RATE)))"
                ),
            )
            for percent in (50, 95)
        ],
    ),
    series(
        "Blocks that travel and that do not",
        "short",
        "Blocks a second: pushed by prefill nodes, and of prompts that decode nodes held already.",
        [
            ("pushed", "sum(rate(tandem_kv_pushed_blocks_total{PREFILL}RATE))"),
            ("reused", "sum(rate(tandem_kv_blocks_reused_total{DECODE}RATE))"),
        ],
        stack=True,
    ),
    series(
        "Ranges of a hand-off",
        "short",
        "How many ranges of memory it came as.",
        [
            (
                f"p{percent}",
                (
                    f"histogram_quantile({percent / 100}, sum by (le)"
                    " (rate(vllm:nixl_num_descriptors_bucket{ROUTER}RATE)))"
                ),
            )
            for percent in (50, 95)
        ],
    ),
    panel("table", "Transports", "none", "What each node chose.", [("", "tandem_kv_transport_info{NODES}")]),
    "Refused and failed",
    series(
        "Refused, by reason",
        "short",
        "Hand-offs that a node refused, in each interval. corrupt, wrong_sequence, wrong_prompt and malformed are no"
        " load, but bytes that changed or are not ours.",
        [("{{reason}}", "sum by (reason) (increase(tandem_handoff_refusals_total{NODES}RATE))")],
        stack=True,
    ),
    series(
        "Not delivered, by cause",
        "short",
        "As their sender has it, in each interval.",
        [("{{cause}}", "sum by (cause) (increase(tandem_handoffs_undelivered_total{PREFILL}RATE))")],
        stack=True,
    ),
    series(
        "What became of them",
        "short",
        "Hand-offs in each interval, as their node has it. released: the grant was not used.",
        [("{{role}} {{state}}", "sum by (role, state) (increase(tandem_handoffs_total{NODES}RATE))")],
    ),
    series(
        "Delivered again",
        "short",
        "Second and further tickets of a request, and requests for which none came in time (--redeliver-wait-ms).",
        [
            ("again", "sum(increase(tandem_handoff_redeliveries_total{PREFILL}RATE))"),
            ("none came", "sum(increase(tandem_handoff_redeliver_timeouts_total{PREFILL}RATE))"),
        ],
    ),
    series(
        "Blocks in quarantine",
        "short",
        "Blocks of ended hand-offs that a writer may still touch.",
        [("{{instance}}", "tandem_kv_quarantined_blocks{NODES}")],
    ),
    series(
        "Transport errors",
        "short",
        "In each interval, over all nodes.",
        [
            ("garbage", "sum(increase(tandem_kv_protocol_errors_total{NODES}RATE))"),
            ("address refused ({{from}})", "sum by (from) (increase(tandem_kv_rejected_addresses_total{NODES}RATE))"),
            ("frame dropped", "sum(increase(tandem_kv_dropped_frames_total{NODES}RATE))"),
            ("peer lost", "sum(increase(tandem_kv_lost_peers_total{NODES}RATE))"),
            ("peer fenced", "sum(increase(tandem_kv_fenced_peers_total{NODES}RATE))"),
        ],
    ),
]

POOLS = [
    "The router's queue",
    series(
        "Queue depth",
        "short",
        "Requests that wait for admission, those that look for a node after a failure, and those that run.",
        [
            ("waiting", "sum(tandem_queued_requests{ROUTER})"),
            ("looking for a node", "sum(tandem_waiting_for_node_requests{ROUTER})"),
            ("running", "sum(tandem_inflight_requests{ROUTER})"),
        ],
    ),
    series(
        "Queue depth by tenant",
        "short",
        "Requests that wait for admission.",
        [("{{tenant}}", "sum by (tenant) (tandem_queue_depth{ROUTER})")],
        stack=True,
    ),
    series(
        "Wait for admission",
        "s",
        "Of those admitted, by priority.",
        [
            (
                "p99 of priority {{priority}}",
                (
                    "histogram_quantile(0.99, sum by (le, priority)"
                    " (rate(tandem_queue_wait_seconds_bucket{ROUTER}RATE)))"
                ),
            )
        ],
        exemplars=True,
    ),
    "KV memory",
    series(
        "KV pressure",
        "percentunit",
        "Share of a node's blocks that sequences hold. Cached blocks are free. The line is the alert's.",
        [("{{instance}}", "vllm:kv_cache_usage_perc{NODES}")],
        lines=[0.9],
        defaults={"max": 1},
    ),
    series(
        "Blocks",
        "short",
        "Over all chosen nodes: free ones hold a reusable prefix (cached) or nothing (empty).",
        [
            ("in use", 'sum(tandem_kv_blocks{NODES,state="total"}) - sum(tandem_kv_blocks{NODES,state="free"})'),
            ("cached", 'sum(tandem_kv_blocks{NODES,state="cached"})'),
            ("empty", 'sum(tandem_kv_blocks{NODES,state="free"}) - sum(tandem_kv_blocks{NODES,state="cached"})'),
        ],
        stack=True,
    ),
    series(
        "Preemptions",
        "short",
        "Sequences and computed prompts that gave their blocks up, in each interval; they are computed again.",
        [("{{instance}}", "sum by (instance) (increase(vllm:num_preemptions_total{NODES}RATE))")],
    ),
    "Work on the nodes",
    series("Running", "short", "Requests in a node's batch.", [("{{instance}}", "tandem_requests_running{NODES}")]),
    series(
        "Waiting",
        "short",
        "Requests on a node that wait for blocks, for the other node of their pair, or for the batch.",
        [("{{instance}}", "tandem_requests_waiting{NODES}")],
    ),
    series(
        "Requests that end",
        "reqps",
        "By node. A pair's request ends on both.",
        [("{{instance}}", "sum by (instance) (rate(tandem_requests_total{NODES}RATE))")],
    ),
    series(
        "Backlog",
        "short",
        "Tokens that a node accepted and has not computed.",
        [("{{instance}}", "tandem_queued_tokens{NODES}")],
    ),
    series(
        "Backlog in time",
        "s",
        "The same by what a prompt's token costs there, as measured: how long a new prompt waits, without the cost of"
        " context.",
        [
            (
                "{{instance}}",
                'tandem_queued_tokens{NODES} * on (job, instance) tandem_step_cost_ms{NODES,of="token"} / 1000',
            )
        ],
    ),
    series(
        "Steps on own and borrowed cores",
        "short",
        "Engine steps a second, by whether other nodes of the machine lent their cores.",
        [("{{instance}} {{cores}}", "sum by (instance, cores) (rate(tandem_steps_total{NODES}RATE))")],
    ),
    series(
        "Output tokens",
        "short",
        "Tokens a second, by decode node.",
        [("{{instance}}", "sum by (instance) (rate(vllm:generation_tokens_total{DECODE}RATE))")],
    ),
    series(
        "ITL on the node",
        "s",
        "p99 of the gaps between two tokens, before the router and the network.",
        [
            (
                "{{instance}}",
                (
                    "histogram_quantile(0.99, sum by (le, instance)"
                    " (rate(vllm:inter_token_latency_seconds_bucket{DECODE}RATE)))"
                ),
            )
        ],
        exemplars=True,
    ),
    series(
        "Cost of a token",
        "ms",
        "By the node's own measurement: of a prompt's token on prefill nodes, of a sequence's next one on decode"
        " nodes.",
        [
            (
                "{{instance}}",
                'tandem_step_cost_ms{PREFILL,of="token"} or tandem_step_cost_ms{DECODE,of="decode_token"}',
            )
        ],
    ),
    series(
        "Drafts that came true",
        "percentunit",
        "Share of the guessed tokens that were right (--speculate).",
        [
            (
                "{{instance}}",
                (
                    "sum by (instance) (rate(tandem_accepted_tokens_total{DECODE}RATE)) / (sum by (instance)"
                    " (rate(tandem_drafted_tokens_total{DECODE}RATE)) > 0)"
                ),
            )
        ],
    ),
    series(
        "Prefix cache of the nodes",
        "percentunit",
        "Share of the looked up tokens that were there.",
        [
            (
                "{{instance}}",
                (
                    "sum by (instance) (rate(vllm:prefix_cache_hits_total{NODES}RATE)) / (sum by (instance)"
                    " (rate(vllm:prefix_cache_queries_total{NODES}RATE)) > 0)"
                ),
            )
        ],
    ),
    "The router's own work",
    series(
        "Texts",
        "short",
        "JSON and tokens that are being made beside the reactor.",
        [("working", "sum(tandem_texts_working{ROUTER})"), ("waiting", "sum(tandem_texts_waiting{ROUTER})")],
    ),
    series(
        "Large bodies",
        "bytes",
        "Bytes of bodies over 16 KiB that are being read, of 24 MiB.",
        [("{{instance}}", "tandem_body_bytes{ROUTER}")],
    ),
    series(
        "Connections", "short", "Open ones, by port.", [("{{port}}", "sum by (port) (tandem_connections{ROUTER})")]
    ),
]

ROUTING = [
    "Choice",
    series(
        "Plans",
        "short",
        "Attempts a second. pair: prefill on one node, decode on another. local: both on one.",
        [("{{plan}}", "sum by (plan) (rate(tandem_plans_total{ROUTER}RATE))")],
        stack=True,
    ),
    series(
        "Prefix cache hits",
        "percentunit",
        "Share of prompt tokens whose KV was there, where the prompt was computed.",
        [
            (
                "hits",
                (
                    "sum(rate(vllm:prefix_cache_hits_total{ROUTER}RATE)) /"
                    " (sum(rate(vllm:prefix_cache_queries_total{ROUTER}RATE)) > 0)"
                ),
            )
        ],
        defaults={"max": 1},
    ),
    series(
        "KV from another node",
        "percentunit",
        "Share of the tokens whose KV was to come from a prefill node and did.",
        [
            (
                "arrived",
                (
                    "sum(rate(vllm:external_prefix_cache_hits_total{ROUTER}RATE)) /"
                    " (sum(rate(vllm:external_prefix_cache_queries_total{ROUTER}RATE)) > 0)"
                ),
            )
        ],
    ),
    "Prediction",
    series(
        "Prediction error",
        "ms",
        "By how much the predicted time to the first token was off, without the queue.",
        quantiles("tandem_prediction_error_ms", by="plan"),
        width=12,
        exemplars=True,
    ),
    series(
        "Prediction error, as a share",
        "percentunit",
        "The same, of the time that it was. The line is the alert's, for the median.",
        quantiles("tandem_prediction_error_ratio", by="plan"),
        width=12,
        exemplars=True,
        lines=[0.5],
    ),
    "Balance",
    series(
        "Imbalance",
        "short",
        "Requests of the busiest node of a pool over the mean of its nodes: 1 is even.",
        [("{{role}}", 'tandem:imbalance:ratio5m{job=~"$job"}')],
        defaults={"min": 1},
    ),
    series(
        "Requests on prefill nodes",
        "reqps",
        "",
        [("{{instance}}", "sum by (instance) (rate(tandem_requests_total{PREFILL}RATE))")],
        stack=True,
    ),
    series(
        "Requests on decode nodes",
        "reqps",
        "",
        [("{{instance}}", "sum by (instance) (rate(tandem_requests_total{DECODE}RATE))")],
        stack=True,
    ),
    "What the router has of the nodes",
    series(
        "Nodes",
        "short",
        "Registered ones, by role.",
        [("{{node_role}}", "max by (node_role) (tandem_nodes{ROUTER})")],
    ),
    series(
        "Prefix index",
        "short",
        "KV blocks that the router has as cached somewhere.",
        [("{{instance}}", "tandem_index_blocks{ROUTER}")],
    ),
    series(
        "Index, lost",
        "short",
        "In each interval: blocks forgotten because the index was full (--index-blocks), and gaps in the nodes'"
        " reports, each of which costs a snapshot.",
        [
            ("forgotten", "sum(increase(tandem_index_evicted_total{ROUTER}RATE))"),
            ("gaps", "sum(increase(tandem_index_gaps_total{ROUTER}RATE))"),
        ],
    ),
]

FAILURES = [
    panel(
        "table",
        "Alerts",
        "none",
        "Pending and firing.",
        [("", 'sum by (alertname, alertstate, severity, role, instance) (ALERTS{alertname=~"Tandem.+"})')],
        width=12,
    ),
    series(
        "Misses of the TTFT objective",
        "percentunit",
        "Share of requests over the windows of the burn-rate alerts. The lines: 1 % (slow), 6 % and 14.4 % (pages).",
        [
            (window, f'max(tandem:ttft_misses:ratio{window}{{job=~"$job"}})')
            for window in ("5m", "30m", "1h", "6h", "3d")
        ],
        width=12,
        lines=[0.01, 0.06, 0.144],
    ),
    series(
        "Misses of the TPOT objective",
        "percentunit",
        "Share of the answers of half an hour. The line is the alert's.",
        [("{{job}}", 'tandem:tpot_misses:ratio30m{job=~"$job"}')],
        width=12,
        lines=[0.05],
    ),
    "Requests",
    series(
        "Not answered, by outcome",
        "reqps",
        "",
        [("{{outcome}}", 'sum by (outcome) (rate(tandem_requests_total{ROUTER,outcome!="ok"}RATE))')],
        stack=True,
    ),
    series(
        "Refused (429), by reason",
        "reqps",
        "Before they started. body: too many large ones were being read. draining and no_pair are a 503.",
        [
            ("{{reason}}", "sum by (reason) (rate(tandem_refused_total{ROUTER}RATE))"),
            ("body", "sum(rate(tandem_intake_refused_total{ROUTER}RATE))"),
        ],
        stack=True,
    ),
    series(
        "Replans, by role and cause",
        "short",
        "Requests that went on with other nodes, in each interval.",
        [("{{node_role}} {{cause}}", "sum by (node_role, cause) (increase(tandem_replans_total{ROUTER}RATE))")],
        stack=True,
    ),
    series(
        "Given up",
        "short",
        "Requests that failed because attempts (--max-attempts), time (--replan-ms) or the retry budget"
        " (--retry-budget-percent) were used up, in each interval.",
        [("{{bound}}", "sum by (bound) (increase(tandem_replan_exhausted_total{ROUTER}RATE))")],
        stack=True,
    ),
    series(
        "Waiting and stalled",
        "short",
        "Requests that wait for a node, for room there or for the retry budget; retries without a token yet; clients"
        " that took no token for --client-stall-ms.",
        [
            ("wait for a node", "sum(tandem_waiting_for_node_requests{ROUTER})"),
            ("retrying", "sum(tandem_retrying_requests{ROUTER})"),
            ("clients stalled", "sum(increase(tandem_client_stalls_total{ROUTER}RATE))"),
        ],
    ),
    series(
        "Failed on nodes",
        "reqps",
        "Calls that did not end well, by node and outcome. A client that leaves is cancelled.",
        [
            (
                "{{instance}} {{outcome}}",
                'sum by (instance, outcome) (rate(tandem_requests_total{NODES,outcome!="ok"}RATE))',
            )
        ],
    ),
    "Nodes",
    states(
        "Answering scrapes",
        "Whether Prometheus reaches them.",
        "{{instance}}",
        'up{job=~"$job",role=~"router|prefill|decode"}',
        [(0, "down", "red"), (1, "up", "green")],
    ),
    states(
        "Circuit breakers",
        "A node whose breaker is open is tried last.",
        "{{node_instance}}",
        "max by (node_instance) (tandem_breaker_state{ROUTER})",
        [(0, "closed", "green"), (1, "half-open", "yellow"), (2, "open", "red")],
    ),
    series(
        "Deaths, by reason",
        "short",
        "Nodes that the router declared dead, in each interval.",
        [("{{reason}}", "sum by (reason) (increase(tandem_node_deaths_total{ROUTER}RATE))")],
        stack=True,
    ),
    series(
        "Lives",
        "short",
        "Sessions of each node with routers: it has one for each router, and begins another one when it lost one.",
        [("{{instance}}", "tandem_router_sessions_total{NODES}")],
        defaults={"decimals": 0},
    ),
    series(
        "Breakers that opened",
        "short",
        "In each interval.",
        [("{{node_role}}", "sum by (node_role) (increase(tandem_breaker_opened_total{ROUTER}RATE))")],
        stack=True,
    ),
    "Doors and traces",
    series(
        "Strangers",
        "short",
        "Calls without the cluster's join token, in each interval.",
        [("{{instance}}", 'sum by (instance) (increase(tandem_strangers_refused_total{job=~"$job"}RATE))')],
    ),
    series(
        "Connections closed or throttled",
        "short",
        "In each interval: idle ones that made room, and newcomers refused because all were busy"
        " (--max-connections); throttled: read later because of their errors.",
        [
            ("{{port}} made room", "sum by (port) (increase(tandem_connections_evicted_total{ROUTER}RATE))"),
            ("{{port}} refused", "sum by (port) (increase(tandem_connections_refused_total{ROUTER}RATE))"),
            ("{{port}} throttled", "sum by (port) (increase(tandem_connections_throttled_total{ROUTER}RATE))"),
        ],
    ),
    series(
        "Spans dropped",
        "short",
        "Spans that the collector did not take, in each interval.",
        [("{{instance}}", 'sum by (instance) (increase(tandem_spans_dropped_total{job=~"$job"}RATE))')],
    ),
]

# uid, title, what it is for, panels. The uids are in people's bookmarks: they stay.
ALL = [
    ("tandem-overview", "Overview", "Latency, goodput and throughput, as clients see them.", OVERVIEW),
    ("tandem-handoff", "Hand-off", "The KV transfer from prefill to decode nodes.", HANDOFF),
    ("tandem-pools", "Pools", "Queues, KV memory and work of the nodes.", POOLS),
    ("tandem-routing", "Routing", "Which nodes are chosen, and how good the predictions are.", ROUTING),
    ("tandem-failures", "Failures", "Alerts, refusals, replans and dead nodes.", FAILURES),
]


def files():
    """What the folder holds: text by file name."""
    return {f"{uid}.json": json.dumps(dashboard(uid, *rest), indent=1) + "\n" for uid, *rest in ALL}


if __name__ == "__main__":
    for name, text in files().items():
        (DASHBOARDS / name).write_text(text)
        print(DASHBOARDS / name)
