#!/usr/bin/env python3
"""What `make test-compose` checks of a cluster that `docker compose up --wait` started, and of the files beside it.

Reads the ports from the environment, as compose does. Every answer is greedy, so that it has the same tokens whichever
nodes gave it, and however many of them died meanwhile.
"""
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy/observability"))
import queries  # noqa: E402

COMPOSE = ["docker", "compose"]
HTTP = f"http://127.0.0.1:{os.environ['TANDEM_HTTP_PORT']}"
PAGE = f"http://127.0.0.1:{os.environ['TANDEM_PAGE_PORT']}"
JAEGER = f"http://127.0.0.1:{os.environ['JAEGER_PORT']}"
PROMETHEUS = f"http://127.0.0.1:{os.environ['PROMETHEUS_PORT']}"
GRAFANA = f"http://127.0.0.1:{os.environ['GRAFANA_PORT']}"
NODES = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
SERVICES = ["router", *NODES, "nodes"]
# What compose.yaml makes of TANDEM_TRANSPORT.
TRANSPORT = {"auto": "ucx/shm", "ucx": "ucx/shm", "tcp": "tcp"}[os.environ.get("TANDEM_TRANSPORT", "auto")]
PROMPTS = [f"{number} + {number + 1} is what? Explain it to a child who likes {thing}."
           for number, thing in enumerate(["ships", "cats", "maps", "trains", "birds", "stars", "bread", "rivers"])]
TOKENS = 160


def say(text):
    print(f"test-compose: {text}", flush=True)


def docker(*words, check=True):
    # Compose looks for its files where it runs.
    done = subprocess.run(words, cwd=ROOT / "deploy/compose", capture_output=True, text=True, timeout=180, check=False)
    if check and done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def compose(*words, check=True):
    return docker(*COMPOSE, *words, check=check)


def container(service):
    return compose("ps", "--all", "--quiet", service)


def inspected(service, form):
    return docker("docker", "inspect", "--format", form, container(service))


def fetch(url, body=None, timeout=60):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"} if data else {})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read().decode(), answer.headers


def eventually(what, seconds, done):
    """Waits until `done()` says something true, and returns it."""
    until = time.monotonic() + seconds
    while True:
        try:
            found = done()
        except (OSError, ValueError, KeyError) as error:
            found, what_else = None, f" ({error})"
        else:
            what_else = ""
        if found:
            return found
        if time.monotonic() > until:
            raise SystemExit(f"not within {seconds} s: {what}{what_else}")
        time.sleep(0.5)


def ask(prompt, tokens=TOKENS):
    """The text of a greedy answer, and its trace id."""
    body = {"model": model(), "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    text, headers = fetch(f"{HTTP}/v1/completions", body, timeout=120)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events and events[-1] == "[DONE]", f"an answer without its end: {events[-1:]}"
    parts = [json.loads(event) for event in events[:-1]]
    assert all("error" not in part for part in parts), parts[-1]
    return "".join(part["choices"][0]["text"] for part in parts if part["choices"]), headers["traceparent"].split("-")[1]


def model():
    return json.loads(fetch(f"{HTTP}/v1/models")[0])["data"][0]["id"]


def under_load(expected, disturb):
    """Asks all prompts at once, twice each; `disturb()` runs once they are being answered. The same answers?"""
    with concurrent.futures.ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
        asked = [(prompt, pool.submit(ask, prompt)) for prompt in PROMPTS * 2]
        time.sleep(1)
        assert not all(answer.done() for _, answer in asked), "all answers ended before anything could happen"
        disturb()
        wrong = [prompt for prompt, answer in asked if answer.result()[0] != expected[prompt]]
    assert not wrong, f"other tokens than undisturbed: {wrong}"


def nodes():
    return {node["id"]: node for node in json.loads(fetch(f"{HTTP}/debug/cluster")[0])["nodes"]}


def healthy(service):
    return inspected(service, "{{.State.Health.Status}}") == "healthy"


def check_containers():
    for service in SERVICES:
        of = inspected(service, "{{.Config.User}} {{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}} {{.HostConfig.Memory}}")
        user, read_only, dropped, memory = of.split()
        assert (user, read_only, dropped) == ("10001:10001", "true", "[ALL]") and int(memory) > 0, f"{service}: {of}"
    token = docker("docker", "inspect", "--format", "{{json .Config}}", container("decode-0"))
    secret = (ROOT / "deploy/compose/secrets/join-token").read_text().strip()
    assert secret not in token, "the join token stands in a container's configuration"
    probe = "exec 3<>/dev/tcp/$0/$1"
    for port in ("8201", "8202", "8203", "8204"):
        for host in ("nodes", "prefill-0"):
            reached = subprocess.run([*COMPOSE, "exec", "-T", "router", "bash", "-c", probe, host, port], cwd=ROOT / "deploy/compose", capture_output=True, check=False)
            assert reached.returncode != 0, f"the router reaches the KV port {host}:{port}"
    outside = subprocess.run([*COMPOSE, "exec", "-T", "router", "tandem-probe", "live"], cwd=ROOT / "deploy/compose", capture_output=True, check=False)
    assert outside.returncode == 0, "the router's probe does not say that it lives"
    size = int(docker("docker", "image", "inspect", "--format", "{{.Size}}", "tandem:cpu"))
    assert size <= 120e6, f"the image has {size / 1e6:.0f} MB"
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    label = '{{index .Config.Labels "org.opencontainers.image.version"}}'
    labelled = docker("docker", "image", "inspect", "--format", label, "tandem:cpu").strip()
    assert labelled == version, f"the image says that it is {labelled}, and it is {version}"
    say(f"containers: not root, read-only, without capabilities, KV out of reach; the image has {size / 1e6:.0f} MB")


def check_parts():
    """The image says what it is made of: what its package manager knows, and the crates of the programs."""
    inside = [*COMPOSE, "exec", "-T", "decode-0"]
    parts = json.loads(docker(*inside, "cat", "/usr/share/doc/tandem/sbom.cdx.json"))
    assert (parts["bomFormat"], parts["specVersion"]) == ("CycloneDX", "1.6"), parts
    named = {each["purl"].split("?")[0]: each for each in parts["components"]}
    assert len(named) == len(parts["components"]), "a component stands there twice"
    installed = docker(*inside, "dpkg-query", "--show", "--showformat", "${Package} ${Version}\n").splitlines()
    packages = {f"{each['name']} {each['version']}" for purl, each in named.items() if purl.startswith("pkg:deb/")}
    assert packages == set(installed), packages ^ set(installed)
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    locked = {f"pkg:cargo/{each['name']}@{each['version']}": each.get("checksum") for each in locked}
    crates = {purl: each for purl, each in named.items() if purl.startswith("pkg:cargo/")}
    assert {"tonic", "tokio", "tandem-router"} <= {each["name"] for each in crates.values()}, sorted(crates)
    for purl, each in crates.items():
        sums = [each["content"] for each in each.get("hashes", [])]
        assert sums == [each for each in [locked[purl]] if each], f"{purl}: {sums}, locked: {locked[purl]}"
        assert each["licenses"][0]["expression"], purl
    say(f"parts: {len(crates)} crates and {len(packages)} packages")


def check_page():
    page, headers = fetch(f"{PAGE}/")
    assert "text/html" in headers["content-type"] and "Tandem" in page, page[:200]
    known = json.loads(compose("exec", "-T", "router", "cat", "/etc/tandem/cluster.json"))["page"]
    host, port = known.removeprefix("http://").split(":")
    reached = subprocess.run([*COMPOSE, "exec", "-T", "router", "bash", "-c", "exec 3<>/dev/tcp/$0/$1", host, port], cwd=ROOT / "deploy/compose", capture_output=True, check=False)
    assert reached.returncode == 0, f"`tandem top` would look at {known}"
    say("the live page is there")


def check_trace():
    joined = nodes()
    assert sorted(joined) == sorted(NODES), f"nodes: {sorted(joined)}"
    _, trace_id = ask("The capital of France is", 8)

    def spans():
        data = json.loads(fetch(f"{JAEGER}/api/v3/traces/{trace_id}")[0])["result"]["resourceSpans"]
        found = [span for resource in data for scope in resource["scopeSpans"] for span in scope["spans"]]
        return found if any(span["name"] == "kv.transfer" for span in found) and any("parentSpanId" not in span or not span["parentSpanId"] for span in found) else None

    found = eventually(f"trace {trace_id} with its transfer in Jaeger", 30, spans)
    transfer = next(span for span in found if span["name"] == "kv.transfer")
    attributes = {each["key"]: next(iter(each["value"].values())) for each in transfer["attributes"]}
    transport = next(value for key, value in attributes.items() if "transport" in key)
    assert transport.startswith(TRANSPORT), f"KV went over {transport}"
    say(f"a trace in Jaeger: {len(found)} spans, KV over {transport}")


def query(expr):
    text, _ = fetch(f"{PROMETHEUS}/api/v1/query?" + urllib.parse.urlencode({"query": expr}))
    return json.loads(text)["data"]["result"]


def check_prometheus():
    def up():
        found = {series["metric"]["instance"] for series in query("up == 1")}
        return found >= {"router", *NODES}

    eventually("Prometheus scrapes all five processes", 60, up)
    rules = json.loads(fetch(f"{PROMETHEUS}/api/v1/rules")[0])["data"]["groups"]
    assert rules and all(rule["health"] in ("ok", "unknown") for group in rules for rule in group["rules"]), rules
    say("Prometheus scrapes five processes and evaluates its rules")


def link_is_measured():
    """Asks with a prompt that nobody has cached, and whose KV is long enough: 1 MiB."""
    ask(f"{time.monotonic()}: {' '.join(PROMPTS)}", tokens=8)
    return query("tandem_kv_link_bytes_per_second > 0")


def check_dashboards():
    """While a node is away: its alert is pending, so that the panel of alerts has something to show as well."""
    eventually("an alert is pending", 90, lambda: query('ALERTS{alertname=~"Tandem.+"}'))
    eventually("a hand-off has measured its link", 90, link_is_measured)
    asked = queries.of_dashboards(rate_interval="5m")
    silent = [f"{each.where}: {each.expr}" for each in asked if not query(each.expr)]
    assert not silent, f"{len(silent)} of {len(asked)} queries of the dashboards have no answer: {silent}"
    say(f"all {len(asked)} queries of the dashboards have an answer")


def check_grafana():
    if not container("grafana"):
        say("Grafana is not there: its image cannot be pulled here")
        return
    def provisioned():
        found = json.loads(fetch(f"{GRAFANA}/api/search?tag=tandem")[0])
        return len(found) >= 5 and found
    found = eventually("Grafana has the dashboards", 60, provisioned)
    say(f"Grafana has {len(found)} dashboards")


def check_kill(expected):
    under_load(expected, lambda: compose("kill", "decode-0"))
    say(f"`docker compose kill decode-0` under {2 * len(PROMPTS)} answers: all as before, token for token")
    compose("up", "--detach", "--wait", "--no-recreate", "--no-deps", "decode-0")
    eventually("decode-0 has joined again", 60, lambda: "decode-0" in nodes())


def check_crash(expected):
    def crash():
        os.kill(int(inspected("decode-1", "{{.State.Pid}}")), signal.SIGKILL)

    under_load(expected, crash)
    eventually("docker starts decode-1 again", 90, lambda: healthy("decode-1") and "decode-1" in nodes())
    assert inspected("decode-1", "{{.RestartCount}}") == "1"
    say("decode-1's process killed: all answers as before, and docker started it again")


def check_drain(expected):
    stopped = time.monotonic()
    under_load(expected, lambda: compose("stop", "decode-0"))
    took = time.monotonic() - stopped
    code = inspected("decode-0", "{{.State.ExitCode}}")
    assert code == "0", f"a drained node ended with status {code}"
    say(f"`docker compose stop decode-0` under load: all answers as before, drained within {took:.0f} s, status 0")
    check_dashboards()
    compose("up", "--detach", "--wait", "--no-recreate", "--no-deps", "decode-0")


TOPOLOGY = """\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-15\t0
GPU1\tNV4\t X \tSYS\tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \tNV4\t16-31\t1
GPU3\tSYS\tSYS\tNV4\t X \t16-31\t1
"""


def config(folder, *files):
    """The services of these files, as docker compose reads them."""
    words = [word for name in ("compose.yaml", *files) for word in ("--file", str(folder / name))]
    return json.loads(docker("docker", "compose", *words, "config", "--format", "json"))["services"]


def devices(service):
    return [gpu for each in service["deploy"]["resources"]["reservations"]["devices"] for gpu in each["device_ids"]]


def check_files():
    """What no machine here can start: the files for GPUs and RDMA, and one that `tandem compose` wrote."""
    shipped = ROOT / "deploy/compose"
    gpus = config(shipped, "compose.gpu.yaml")
    assert [devices(gpus[node]) for node in NODES] == [["0"], ["1"], ["2"], ["3"]]
    assert all(gpus[node][kind] == "service:nodes" for node in NODES for kind in ("ipc", "pid"))
    assert "--transport=auto" in gpus["decode-0"]["command"], "a GPU whose UCX has no CUDA takes tcp"
    assert "--ucx-lib-dir=/opt/ucx/lib" in " ".join(gpus["decode-0"]["entrypoint"]), "the UCX that knows CUDA"
    assert gpus["decode-0"]["ulimits"]["memlock"] == -1 and int(gpus["nodes"]["shm_size"]) == 16 << 30
    rdma = config(shipped, "compose.rdma.yaml", "compose.gpu.yaml")
    assert all(rdma[service]["network_mode"] == "host" for service in ("nodes", "router", "jaeger", "prometheus", "grafana"))
    assert "--ucx-profile=rdma" in rdma["decode-0"]["command"] and rdma["decode-0"]["devices"][0]["source"] == "/dev/infiniband"
    within_tls = config(shipped, "compose.tls.yaml")
    for service in ("router", *NODES):
        role = service.split("-")[0]
        (folder,) = [volume["source"] for volume in within_tls[service]["volumes"] if volume["target"] == "/etc/tandem/tls"]
        assert folder.endswith(f"secrets/tls/{role}"), "each has the certificate of its own role"
        named = [name for name in within_tls[service]["environment"] if "_NODE_TLS_" in name]
        assert len(named) == 3, named
    assert all(within_tls[node]["environment"]["ROUTER"] == "https://router:8002" for node in NODES)
    config(shipped, "compose.ca.yaml")
    behind_proxy = config(shipped, "compose.ca.yaml", "compose.gpu.yaml", "compose.gpu.ca.yaml")
    assert all(behind_proxy[built]["build"]["secrets"] for built in ("router", "prefill-0")), "each build trusts them"

    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "compose"
        shutil.copytree(shipped, copy)
        smi = pathlib.Path(folder) / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\ncat <<'END'\n{TOPOLOGY}END\n")
        smi.chmod(0o755)
        model_file = pathlib.Path(folder) / "llama.gguf"
        model_file.touch()
        target = subprocess.run([ROOT / "deploy/target_dir.sh"], capture_output=True, text=True, check=True).stdout.strip()

        def written(*flags):
            words = [f"{target}/release/tandem", "compose", *flags, "--output", str(copy / "compose.host.yaml")]
            done = subprocess.run(words, env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            return config(copy, "compose.host.yaml")

        host = written("--gpus", "0-3", "--prefill", "1", "--decode", "3", "--model", str(model_file))
        nodes_of = sorted(name for name in host if re.fullmatch(r"(prefill|decode)-\d+", name))
        assert nodes_of == ["decode-0", "decode-1", "decode-2", "prefill-0"], nodes_of
        assert sorted(devices(host[node])[0] for node in nodes_of) == ["0", "1", "2", "3"]
        own = {"ROLE": "decode", "NODE": "decode-2", "NUMBER": "04", "MODEL": "llama.gguf"}
        assert host["decode-2"]["environment"] == own | {"DEVICE": "cpu", "XDG_CACHE_HOME": "/tmp"}, host["decode-2"]
        assert host["decode-2"]["network_mode"] == "service:nodes" and host["decode-2"]["cpuset"] == "16-31"
        assert host["router"]["volumes"][0]["source"] == folder and "decode-2" in host["router"]["depends_on"]
        pairs = written("--gpus", "0-3", "--prefill", "2")
        assert {devices(pairs[node])[0] for node in ("prefill-0", "prefill-1")} == {"0", "2"}, "both ends of an NVLink prefill"
        written("--prefill", "1", "--decode", "1")
    say("files: GPUs, RDMA, both; and what `tandem compose` writes")


def main():
    check_files()
    check_containers()
    check_parts()
    check_page()
    check_trace()
    expected = {prompt: ask(prompt)[0] for prompt in PROMPTS}
    check_prometheus()
    check_kill(expected)
    check_crash(expected)
    check_drain(expected)
    check_grafana()


if __name__ == "__main__":
    main()
