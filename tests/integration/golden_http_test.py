"""Golden models served in parity mode, token ids in and out, compared from outside through logprobs.

A model directory without a tokenizer is served too. Logits are compared up to the constant that
log-softmax takes away: both sides are shifted to log-probabilities.
"""

import math
import pathlib
import shutil
import tempfile
import unittest

import harness
import safetensors_io

VOCAB = 256
FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "kimi_k2", "qwen3_moe_fp8"]


def log_softmax(row):
    top = max(row)
    total = math.log(sum(math.exp(value - top) for value in row)) + top
    return [value - total for value in row]


def prompt_logprobs(server, ids):
    """[len(ids) - 1][VOCAB]: log-probabilities at every prompt position but the last, by echo."""
    status, answer = server.post("/v1/completions", {
        "model": "", "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": VOCAB, "temperature": 0,
        "return_token_ids": True, "return_tokens_as_token_ids": True}, timeout=120)
    if status != 200:
        raise AssertionError(answer)
    found = []
    for entry in answer["choices"][0]["logprobs"]["top_logprobs"]:
        if entry is None:  # the first token has none
            continue
        row = [None] * VOCAB
        for key, value in entry.items():
            row[int(key.removeprefix("token_id:"))] = value
        found.append(row)
    return found


def greedy(server, ids, count):
    status, answer = server.post("/v1/completions", {
        "model": "", "prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True}, timeout=120)
    if status != 200:
        raise AssertionError(answer)
    return answer["choices"][0]["token_ids"]


class Golden(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if harness.golden("llama") is None:
            raise unittest.SkipTest("no golden models beside the project")

    def serve(self, model, *options):
        return harness.Server(model, "--parity", f"--max-logprobs={VOCAB}", "--max-sequences=4",
                              "--kv-cache-tokens=2048", *options)

    def compare(self, server, family, expected):
        for name in ("seq0", "seq1"):
            ids = safetensors_io.values(expected[f"{name}.ids"])
            logits = safetensors_io.rows(expected[f"{name}.logits"])
            largest = max(abs(value) for row in logits for value in row)
            worst = 0.0
            for position, row in enumerate(prompt_logprobs(server, ids)[:len(ids) - 1]):
                want = log_softmax(logits[position])
                worst = max(worst, max(abs(a - b) for a, b in zip(row, want)))
            self.assertLess(worst, 1e-4 * largest, f"{family} {name}")
            steps = safetensors_io.values(expected[f"{name}.greedy.ids"])
            self.assertEqual(greedy(server, ids, len(steps)), steps, f"{family} {name}")

    def test_families_with_one_two_and_three_workers(self):
        for number, family in enumerate(FAMILIES):
            model = harness.golden(family)
            expected = safetensors_io.read(model / "expected.safetensors")
            # Every family with one worker; the number of workers varies over the MoE families.
            for workers in {1, 1 + number % 3}:
                with self.subTest(family=family, workers=workers):
                    with self.serve(model, f"--expert-workers={workers}") as server:
                        self.compare(server, family, expected)

    def altered(self, family):
        directory = pathlib.Path(tempfile.mkdtemp(prefix="tandem-golden-"))
        self.addCleanup(shutil.rmtree, directory)
        return harness.copy_model(harness.golden(family), directory / family)


if __name__ == "__main__":
    unittest.main()
