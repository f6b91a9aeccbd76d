#!/usr/bin/env python3
"""How the router's policies compare on a production trace: `make bench-policies`.

A real node's step costs are measured first; two prefill and two decode nodes simulate them (the tokens mean nothing, the
times are those of the model, divided by --faster; what the router itself takes is not). Then each policy replays the same
slice of the trace on a cluster of its own, one policy after another at each speed of the trace. Prints a Markdown table.

--routers 1,3 compares one router with three, in turns: as many clients as there are routers at most have a part of the
requests each, and a router each where there are so many.
"""
import argparse
import json
import urllib.request

import shared_trace
from cluster import Cluster
from target_dir import TARGET_DIR

POLICIES = ["round-robin", "least-loaded", "cache-only", "joint"]


def step_costs(tandem, threads):
    """Microseconds a step and a token, nanoseconds a position, of the prefill and of the decode node."""
    with Cluster(tandem, ["--threads", str(threads), "--no-pin", "--router-arg=--local-prefill=never"]) as cluster:
        cluster.bench("--row", "a", "--rate", "3", "--seconds", "15", "--warmup", "1")
        with urllib.request.urlopen(f"{cluster.http}/debug/cluster") as answer:
            nodes = json.load(answer)["nodes"]
    costs = {}
    for node in nodes:
        cost = node["step_cost"]
        # A simulated node has one delay for all tokens: of a node that decodes, decode's.
        kind = "decode_" if node["role"] == "decode" else ""
        token_ms, context_ms = cost[f"{kind}token_ms"], cost[f"{kind}context_ms"]
        costs[node["role"]] = [cost["base_ms"] * 1e3, token_ms * 1e3, context_ms * 1e6]
    return costs


def replay(args, policy, routers, speed, flags):
    clients = max(args.routers)
    how = ["--trace-scale", str(args.scale), "--trace-speed", str(speed * args.faster), "--drain", "120"]
    if clients > 1:
        lines = shared_trace.slice_of(args.trace, args.first, args.requests)
        with Cluster(args.tandem, [*flags, f"--routers={routers}", f"--router-arg=--policy={policy}"]) as cluster:
            return shared_trace.replay(args.tandem, cluster.routers, lines, clients, how)
    part = ["--trace-from", str(args.first), "--trace-requests", str(args.requests)]
    with Cluster(args.tandem, [*flags, f"--router-arg=--policy={policy}"]) as cluster:
        return cluster.bench("--trace", args.trace, *part, *how)


def row(policy, routers, speed, whole):
    point = whole["tandem"]["points"][0]
    server, nodes = point["server"], point["nodes"]
    error = server["ttft_prediction_error"]["median"]
    cells = [
        f"{speed:g}", policy, f"{routers}", f"{whole['completed']} of {point['requests']}", f"{whole['mean_ttft_ms']:.0f}",
        f"{whole['median_ttft_ms']:.0f}", f"{whole['p99_ttft_ms']:.0f}", f"{whole['mean_tpot_ms']:.1f}",
        f"{100 * (point['hit_rate'] or 0):.0f} %", f"{nodes['prompts']['tokens_max_by_mean'] or 0:.2f}",
        "–" if error is None else f"{100 * error:.0f} %", f"{server['local']}",
    ]
    print("| " + " | ".join(cells) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tandem", default=str(TARGET_DIR / "release/tandem"))
    parser.add_argument("--trace", required=True, help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--scale", type=int, default=32, help="lengths are divided by this")
    parser.add_argument("--first", type=int, default=300, help="second of the trace at which the slice begins")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--speeds", default="1,1.5,2", help="of the trace, one table part each")
    parser.add_argument("--policies", default=",".join(POLICIES))
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser.add_argument("--routers", type=numbers, default=[1], help="how many there are, several counts in turns: 1,3")
    parser.add_argument("--rounds", type=int, default=1, help="of all counts of routers and all policies, at each speed")
    parser.add_argument("--threads", type=int, default=1, help="of the node whose step costs are measured")
    parser.add_argument("--kv-blocks", type=int, default=4096)
    parser.add_argument("--costs", help="prefill and decode costs instead of measuring: us,us,ns:us,us,ns")
    parser.add_argument("--faster", type=float, default=10, help="simulated nodes take so many times less, and the trace comes so "
                        "many times as fast: the same load in less time, for a longer slice")
    parser.add_argument("--real", action="store_true", help="real nodes instead of simulated ones, one thread each")
    args = parser.parse_args()

    if args.real:
        args.faster = 1
        flags = ["--prefill", "2", "--decode", "2", "--no-pin", "--threads", "1"]
    else:
        if args.costs:
            prefill, decode = ([float(cost) for cost in role.split(",")] for role in args.costs.split(":"))
        else:
            costs = step_costs(args.tandem, args.threads)
            prefill, decode = costs["prefill"], costs["decode"]
        flags = ["--simulated", "--prefill", "2", "--decode", "2", "--no-pin", "--threads", "1"]
        for role, (step, token, context) in (("prefill", prefill), ("decode", decode)):
            for name, value in (("step-us", step), ("token-us", token), ("context-ns", context)):
                flags += [f"--{role}-arg=--simulated-{name}={value / args.faster:.0f}"]
            print(f"{role}: {step:.0f} us a step, {token:.0f} us a token, {context:.0f} ns a position")
    flags += ["--kv-blocks", str(args.kv_blocks)]

    print("\n| speed | policy | routers | answered | mean TTFT ms | p50 | p99 | mean TPOT ms | hit rate | busiest prefill by mean | error of the TTFT prediction | local |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for speed in map(float, args.speeds.split(",")):
        for turn in range(args.rounds):
            for policy in args.policies.split(","):
                # Another count is the first in each round.
                for routers in args.routers[turn % len(args.routers):] + args.routers[:turn % len(args.routers)]:
                    row(policy, routers, speed, replay(args, policy, routers, speed, flags))


if __name__ == "__main__":
    main()
