"""Tokens per second of the shipped model through HTTP, with 1 and with 16 streams.

  TANDEM_BIN_DIR=build/release/bin TANDEM_SOURCE_ROOT=$PWD /usr/bin/python3 tests/bench/serving_bench.py \
      [--json FILE] [--trace] [serve options]

Every figure is the median of several rounds of greedy streams of a fixed length (ignore_eos). Beside the
rate: the worker's time of a step, the part of it spent on handing rows to experts and waiting for them,
and what a step takes outside of the worker (scheduling, gRPC, detokenizing, HTTP).

--trace: instead, what recording a timeline costs. Rounds with and without a recording take turns; printed
is the median of their ratios, and the quartiles beside it.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "integration"))
import harness  # noqa: E402 - found through the line above

ROUNDS = 5
TRACE_ROUNDS = 24
TOKENS = 400


def generate(server, seed):
    stream = server.stream("/v1/chat/completions", harness.chat(
        "Tell me a story.", temperature=1, seed=seed, ignore_eos=True, max_tokens=TOKENS))
    for _ in stream:
        pass
    assert stream.done


def worker_times(server, port):
    metrics = server.metrics(port)
    return [metrics[f"tandem_gpu_worker_{name}"] for name in
            ("steps_total", "step_seconds_total", "expert_wait_seconds_total")]


def generate_all(server, streams, seed):
    """-> seconds that all streams together took."""
    started = time.monotonic()
    threads = [threading.Thread(target=generate, args=(server, seed + i)) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - started


def measure(server, port, streams):
    rounds = []
    for number in range(ROUNDS + 1):  # the first warms up
        before = worker_times(server, port)
        wall = generate_all(server, streams, 100 * number)
        steps, busy, experts = (b - a for a, b in zip(before, worker_times(server, port)))
        rounds.append({"tokens_per_s": streams * TOKENS / wall, "step_us": 1e6 * busy / steps,
                       "expert_wait_us": 1e6 * experts / steps, "outside_worker_us": 1e6 * (wall - busy) / steps})
    return {"streams": streams, "rounds": ROUNDS,
            **{key: statistics.median(row[key] for row in rounds[1:]) for key in rounds[0]}}


def start_recording(server, directory):
    """The processes may not have noticed yet that the recording before has ended."""
    deadline = time.monotonic() + 10
    while True:
        recording = subprocess.Popen([str(harness.BIN / "tandem"), "trace", "--seconds=60", f"--out={directory}/t",
                                      f"--run-dir={server.run_directory()}"], stderr=subprocess.PIPE, text=True)
        said = recording.stderr.readline()
        if said.startswith("recording "):
            return recording
        recording.wait()
        recording.stderr.close()
        assert "already" in said and time.monotonic() < deadline, said


def traced_round(server, streams, seed):
    with tempfile.TemporaryDirectory() as directory:
        recording = start_recording(server, directory)
        try:
            seconds = generate_all(server, streams, seed)
            assert recording.poll() is None, "the recording ended before the round"
            return seconds
        finally:
            recording.kill()
            recording.wait()
            recording.stderr.close()


def measure_trace(server, _port, streams):
    generate_all(server, streams, 0)
    ratios = []
    for number in range(TRACE_ROUNDS):
        turns = [("plain", generate_all), ("traced", traced_round)]
        if number % 2 == 1:
            turns.reverse()
        seconds = {name: run(server, streams, 100 * number) for name, run in turns}
        ratios.append(seconds["traced"] / seconds["plain"])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"streams": streams, "rounds": TRACE_ROUNDS, "traced_over_plain_time": middle, "lower_quartile": low,
            "upper_quartile": high}


def main():
    arguments = sys.argv[1:]
    target = None
    if arguments[:1] == ["--json"]:
        target, arguments = arguments[1], arguments[2:]
    traced = "--trace" in arguments
    arguments = [argument for argument in arguments if argument != "--trace"]
    with harness.Server(harness.TINY, *arguments) as server:
        port = next(p for p in server.metrics_ports() if "tandem_gpu_worker_steps_total" in harness.scrape(p))
        results = [(measure_trace if traced else measure)(server, port, streams) for streams in (1, 16)]
    for row in results:
        print("  ".join(f"{key} {value:.{4 if traced else 1}f}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in row.items()))
    if target:
        pathlib.Path(target).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
