"""Pipelined steps through the real processes: deferral and ping-pong answer, and show in metrics."""

import concurrent.futures
import unittest

import harness

QUESTION = "What is 17 + 25?"


def worker_metrics(server):
    """Series of the gpu_worker."""
    for port in server.metrics_ports():
        series = server.metrics(port)
        if any(name.startswith("tandem_gpu_worker_") for name in series):
            return series
    raise AssertionError("no gpu_worker metrics")


def steps(series, policy):
    return series[f'tandem_gpu_worker_pipeline_steps_total{{policy="{policy}"}}']


class Pipeline(unittest.TestCase):
    def ask(self, server):
        status, answer = server.post("/v1/chat/completions", harness.chat(QUESTION, temperature=0))
        self.assertEqual(status, 200, answer)
        return answer["choices"][0]["message"]["content"]

    def test_deferral_and_lanes_answer_and_are_counted(self):
        with harness.Server(harness.TINY, "--pipeline=both", "--max-deferred=2", "--max-deferred-mass=0.3") as server:
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                for answer in pool.map(lambda _: self.ask(server), range(8)):
                    self.assertIn("42", answer)
            series = worker_metrics(server)
            self.assertGreater(steps(series, "both"), 0)
            self.assertEqual(steps(series, "plain"), 0)
            self.assertGreater(series["tandem_gpu_worker_deferred_picks_total"], 0)
            mass = series["tandem_gpu_worker_deferred_mass_rows_total"] / series["tandem_gpu_worker_routed_rows_total"]
            self.assertGreater(mass, 0)
            self.assertLessEqual(mass, 0.3)
            layers = [name for name in series if name.startswith("tandem_gpu_worker_layer_stall_seconds_total")]
            self.assertEqual(len(layers), 2 * 6)  # both sides of six layers

    def test_sides_that_share_cores_are_plain_and_exact_by_default(self):
        with harness.Server(harness.TINY, "--max-deferred=2") as server:
            self.assertIn("42", self.ask(server))
            series = worker_metrics(server)
            self.assertGreater(steps(series, "plain"), 0)
            self.assertEqual(series["tandem_gpu_worker_deferred_picks_total"], 0)

    def test_deferral_without_a_limit_is_refused(self):
        _, output = harness.refused(harness.TINY, "--pipeline=deferral")
        self.assertIn("--max-deferred", output)

    def test_a_mass_is_a_share(self):
        _, output = harness.refused(harness.TINY, "--max-deferred=2", "--max-deferred-mass=30")
        self.assertIn("max-deferred-mass", output)


if __name__ == "__main__":
    unittest.main()
