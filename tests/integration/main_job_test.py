"""README command one's work: the shipped model answers through three processes."""

import os
import pathlib
import subprocess
import time
import unittest

import harness


class MainJob(unittest.TestCase):
    def test_run_answers_the_question(self):
        done = subprocess.run([str(harness.BIN / "tandem"), "run", "--temperature", "0", "What is 17 + 25?"],
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("42", done.stdout)

    def test_chat_keeps_talking(self):
        done = subprocess.run([str(harness.BIN / "tandem"), "chat", "--temperature", "0"], text=True,
                              input="What is 17 + 25?\nWhat is 3 + 4?\n", capture_output=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("42", done.stdout.split("\n")[0])
        self.assertIn("7", done.stdout.split("\n")[1])

    def test_three_programs_serve_and_end_in_order(self):
        with harness.Server() as server:
            self.assertEqual(set(server.children()),
                             {"tandem-gateway", "tandem-gpu-worker", "tandem-expert-worker"})
            status, answer = server.post("/v1/chat/completions", harness.chat("What is 17 + 25?", temperature=0))
            self.assertEqual(status, 200, answer)
            self.assertIn("42", answer["choices"][0]["message"]["content"])
            pids = [pid for group in server.children().values() for pid in group]
            started = time.monotonic()
            self.assertEqual(server.stop(), 0, server.log())
            # Less than the workers' grace: nobody holds a connection that is not read.
            self.assertLess(time.monotonic() - started, 3, server.log())
            for pid in pids:
                self.assertFalse(os.path.exists(f"/proc/{pid}"), f"{pid} lives on")

    def test_idle_burns_no_core(self):
        """All processes together under 1 % of a CPU."""
        with harness.Server() as server:
            server.post("/v1/chat/completions", harness.chat("What is 1 + 1?", temperature=0))
            time.sleep(2)  # spinning threads must be asleep by now
            pids = [server.process.pid] + [pid for group in server.children().values() for pid in group]

            def ticks():
                total = 0
                for pid in pids:
                    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                    total += int(fields[11]) + int(fields[12])
                return total

            # Who spins does so all the time; what a wake-up costs wavers with the machine.
            shares = []
            while len(shares) < 4 and (not shares or shares[-1] >= 0.01):
                before, started = ticks(), time.monotonic()
                time.sleep(6)
                spent = (ticks() - before) / os.sysconf("SC_CLK_TCK")
                shares.append(spent / (time.monotonic() - started))
            self.assertLess(min(shares), 0.01, f"shares of a CPU while idle: {shares}")

    def test_key_from_the_environment(self):
        with harness.Server(env={"TANDEM_API_KEY": "secret"}) as server:
            question = harness.chat("What is 17 + 25?", temperature=0)
            self.assertEqual(server.post("/v1/chat/completions", question)[0], 401)
            status, _ = server.post("/v1/chat/completions", question, headers={"Authorization": "Bearer secret"})
            self.assertEqual(status, 200)
            self.assertNotIn("secret", server.log())

    def test_readonly_model_directory_and_several_workers(self):
        with harness.Server(harness.TINY, "--expert-workers=3", "--expert-shares=3,1,0") as server:
            self.assertEqual(len(server.children()["tandem-expert-worker"]), 3)
            _, answer = server.post("/v1/chat/completions", harness.chat("What is 17 + 25?", temperature=0))
            self.assertIn("42", answer["choices"][0]["message"]["content"])


if __name__ == "__main__":
    unittest.main()
