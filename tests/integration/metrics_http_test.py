"""What Prometheus sees: every process's /metrics passes promtool; sums agree after abandoned requests."""

import shutil
import subprocess
import time
import unittest

import harness


class Metrics(unittest.TestCase):
    def test_promtool_accepts_every_process(self):
        promtool = shutil.which("promtool")
        if promtool is None:
            self.skipTest("no promtool (Debian package prometheus)")
        with harness.Server() as server:
            server.post("/v1/chat/completions", harness.chat("What is 1 + 1?", temperature=0))
            ports = set(server.metrics_ports())
            self.assertEqual(len(ports), 3, server.log())
            for port in ports:
                text = harness.scrape(port)
                checked = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True)
                self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    # ME-1: five streams are abandoned; they count as cancelled requests and nothing else.
    def test_me_1_abandoned_requests_are_counted_once_everywhere(self):
        with harness.Server() as server:
            server.post("/v1/chat/completions", harness.chat("What is 1 + 1?", temperature=0))
            time.sleep(0.5)
            before = server.metrics()
            for i in range(5):
                stream = server.stream("/v1/chat/completions", harness.chat(
                    "Tell me a story.", seed=i, ignore_eos=True, max_tokens=900))
                stream.response.read(64)
                stream.close()
            time.sleep(2)
            after = server.metrics()

            def delta(name):
                return after.get(name, 0) - before.get(name, 0)

            outcomes = {name: delta(name) for name in after if name.startswith("tandem_gateway_requests_total")}
            self.assertEqual({name: value for name, value in outcomes.items() if value},
                             {'tandem_gateway_requests_total{outcome="cancelled"}': 5})
            self.assertEqual(after["tandem_gateway_running_sequences"], 0)
            counts = {name: delta(name) for name in after
                      if name.endswith("_count") and ("request" in name or "prompt_tokens" in name)}
            self.assertIn(set(counts.values()), ({0}, {5}, set()), counts)


if __name__ == "__main__":
    unittest.main()
