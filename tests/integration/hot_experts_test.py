"""Hot experts through the real processes: the busiest experts move to the device, from the workers'
own memory; a lost worker's weights come back with it; counts outlive a restart."""

import os
import pathlib
import signal
import time
import unittest

import harness

QUESTION = "What is 17 + 25?"
WORKERS = ["--expert-workers=2", "--numa=2"]
DEADLINE_SECONDS = 60


def worker_metrics(server):
    """Series of the gpu_worker; ports of processes that are gone answer nothing."""
    for port in server.metrics_ports():
        try:
            series = server.metrics(port)
        except OSError:
            continue
        if any(name.startswith("tandem_gpu_worker_") for name in series):
            return series
    raise AssertionError("no gpu_worker metrics")


def ask(server):
    return server.post("/v1/chat/completions", harness.chat(QUESTION, temperature=0))


class HotExperts(unittest.TestCase):
    def answered(self, server):
        status, answer = ask(server)
        self.assertEqual(status, 200, answer)
        self.assertIn("42", answer["choices"][0]["message"]["content"])

    def ask_until(self, server, name, least):
        """Asks until a series of the gpu_worker has reached `least`."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            self.answered(server)
            series = worker_metrics(server)
            if series[name] >= least:
                return series
            self.assertLess(time.monotonic(), deadline, f"{name} is {series[name]}, not {least}")

    def test_experts_of_two_workers_move_to_the_device(self):
        with harness.Server(harness.TINY, "--hot-experts-gb=0.01", *WORKERS) as server:
            series = self.ask_until(server, "tandem_gpu_worker_hot_expert_hits_total", 1000)
            self.assertGreater(series["tandem_gpu_worker_hot_expert_migrations_total"], 0)
            self.assertGreater(series["tandem_gpu_worker_hot_expert_bytes"], 0)
            self.assertLessEqual(series["tandem_gpu_worker_hot_expert_bytes"], 1e7)
            self.assertGreater(series["tandem_gpu_worker_hot_expert_picks_total"],
                               series["tandem_gpu_worker_hot_expert_hits_total"])
            self.assertEqual(series["tandem_gpu_worker_hot_expert_failed_copies_total"], 0)

    def test_counts_are_kept_for_the_next_start(self):
        with harness.Server(harness.TINY, "--hot-experts-gb=0.01") as server:
            self.ask_until(server, "tandem_gpu_worker_hot_expert_hits_total", 100)
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(DEADLINE_SECONDS)
            kept = list((pathlib.Path(server.state_dir) / "hot-experts").glob("*.counts"))
            self.assertEqual(len(kept), 1)
            self.assertGreater(os.path.getsize(kept[0]), 6 * 32 * 4)

    def test_off_by_default(self):
        with harness.Server(harness.TINY) as server:
            self.answered(server)
            series = worker_metrics(server)
            self.assertEqual(series["tandem_gpu_worker_hot_expert_capacity_bytes"], 0)
            self.assertEqual(series["tandem_gpu_worker_hot_expert_hits_total"], 0)

    def test_a_budget_that_holds_no_expert_is_named_and_nothing_else_changes(self):
        with harness.Server(harness.TINY, "--hot-experts-gb=0.00001") as server:
            self.answered(server)
            self.assertIn("holds no hot expert", server.log())
            series = worker_metrics(server)
            self.assertEqual(series["tandem_gpu_worker_hot_expert_capacity_bytes"], 0)

    def test_a_lost_worker_brings_its_weights_back(self):
        with harness.Server(harness.TINY, "--hot-experts-gb=0.002", *WORKERS) as server:
            self.ask_until(server, "tandem_gpu_worker_hot_expert_migrations_total", 10)
            os.kill(server.pid_of("tandem-expert-worker"), signal.SIGKILL)
            deadline = time.monotonic() + DEADLINE_SECONDS
            while ask(server)[0] != 200:
                self.assertLess(time.monotonic(), deadline, "the worker does not come back")
            before = worker_metrics(server)["tandem_gpu_worker_hot_expert_hits_total"]
            self.ask_until(server, "tandem_gpu_worker_hot_expert_hits_total", before + 1000)


if __name__ == "__main__":
    unittest.main()
