"""Hot experts through the real processes: the busiest experts move to the device, from the workers'
own memory; a lost worker's weights come back with it; counts outlive a restart."""

import os
import pathlib
import re
import signal
import time
import unittest

import faults_test
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

    def test_a_budget_that_holds_no_expert_is_refused_naming_the_least_that_does(self):
        for options in (WORKERS, ["--link=inprocess"]):
            _, output = harness.refused(harness.TINY, "--hot-experts-gb=0.00001", *options)
            self.assertIn("--hot-experts-gb=0.000010 holds no hot expert", output)
            least = re.search(r"At least --hot-experts-gb=([0-9.]+)", output)
            self.assertIsNotNone(least, output)
        with harness.Server(harness.TINY, f"--hot-experts-gb={least[1]}") as server:
            self.ask_until(server, "tandem_gpu_worker_hot_expert_migrations_total", 1)

    def test_mapped_weights_are_refused(self):
        _, output = harness.refused(harness.TINY, "--hot-experts-gb=0.01", "--weights=map")
        self.assertIn("--weights=copy", output)

    def test_a_lost_worker_brings_its_weights_back(self):
        with harness.Server(harness.TINY, "--hot-experts-gb=0.002", *WORKERS) as server:
            self.ask_until(server, "tandem_gpu_worker_hot_expert_migrations_total", 10)
            os.kill(server.pid_of("tandem-expert-worker"), signal.SIGKILL)
            deadline = time.monotonic() + DEADLINE_SECONDS
            while ask(server)[0] != 200:
                self.assertLess(time.monotonic(), deadline, "the worker does not come back")
            before = worker_metrics(server)["tandem_gpu_worker_hot_expert_hits_total"]
            self.ask_until(server, "tandem_gpu_worker_hot_expert_hits_total", before + 1000)

    def test_a_worker_killed_while_experts_move_fails_its_streams_alone(self):
        with harness.Server(harness.TINY, "--hot-experts-gb=0.01", *WORKERS) as server:
            migrations = "tandem_gpu_worker_hot_expert_migrations_total"
            load = faults_test.Load(server, 3)
            deadline = time.monotonic() + DEADLINE_SECONDS
            while worker_metrics(server)[migrations] == 0:
                self.assertLess(time.monotonic(), deadline, "nothing moves")
            pid = server.pid_of("tandem-expert-worker")
            os.kill(pid, signal.SIGKILL)
            self.assertTrue(load.join(15), f"streams hang: {load.ends}\n{server.log()}")
            self.assertEqual(load.ends, ["errors 1"] * 3)
            self.assertTrue(server.wait_ready(20), server.log())
            before = worker_metrics(server)
            self.ask_until(server, "tandem_gpu_worker_hot_expert_hits_total",
                           before["tandem_gpu_worker_hot_expert_hits_total"] + 1000)
            # What was given up is said, and why.
            if before["tandem_gpu_worker_hot_expert_failed_copies_total"] > 0:
                self.assertIn("event=hot_expert_not_copied", server.log())
                self.assertIn("has handed over no weights", server.log())


if __name__ == "__main__":
    unittest.main()
