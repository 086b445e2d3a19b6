"""Golden models served in parity mode, compared with the reference from outside.

Every family is fed whole, in chunks of five and token by token, alone, batched with another sequence and
behind the prefix cache: the logits are the reference's, and bit by bit the same in all of these as long as
the number of expert workers is the same.
"""

import statistics
import unittest

import golden_client
import harness
import safetensors_io

DENSE = ["llama", "qwen2", "qwen3"]
EXPERTS = ["mixtral", "qwen3_moe", "deepseek_v3", "kimi_k2", "qwen3_moe_fp8"]
STEPS = 24
# Bound of the median row's error, as a part of the largest logit.
DEFAULT_MODE_MEDIAN = {"llama": 0.02, "qwen3": 0.02, "mixtral": 0.03, "qwen3_moe": 0.03, "deepseek_v3": 0.03,
                       "kimi_k2": 0.03}


class Golden(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if harness.golden("llama") is None:
            raise unittest.SkipTest("no golden models beside the project")

    def check_family(self, family, workers, chunks):
        """`chunks`: prompt tokens in one step; 0: as many as there are."""
        reference = golden_client.expected(family)
        first = None
        for chunk in chunks:
            with self.subTest(family=family, workers=workers, chunk=chunk or "whole"):
                env = {"TANDEM_PREFILL_CHUNK_TOKENS": str(chunk)} if chunk else {}
                with golden_client.serve(harness.golden(family), f"--expert-workers={workers}", env=env) as server:
                    found = golden_client.assert_golden(self, server, family, reference)
                    first = first or found
                    self.assertEqual(found, first, "bits depend on the chunking")
                    self.check_batch(server, reference, found)
                    self.check_prefix_cache(server, reference, found)

    # Both prompts are one request, so that they are in the same steps.
    def check_batch(self, server, reference, alone):
        names = list(alone)
        prompts = [safetensors_io.values(reference[f"{name}.ids"]) for name in names]
        answer = golden_client.complete(server, prompts, STEPS, echo=True)
        for name, choice in zip(names, answer["choices"]):
            self.assertEqual(golden_client.rows(choice), alone[name][0], "bits depend on the batch")
            self.assertEqual(choice["token_ids"], alone[name][1])

    def check_prefix_cache(self, server, reference, alone):
        ids = safetensors_io.values(reference["seq0.ids"])
        for expect_hit in (False, True):
            answer = golden_client.complete(server, ids, STEPS)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.assertEqual(cached > 0, expect_hit, answer["usage"])
            choice = answer["choices"][0]
            self.assertEqual(golden_client.rows(choice), alone["seq0"][0][len(ids) - 1:],
                             "bits depend on the prefix cache")
            self.assertEqual(choice["token_ids"], alone["seq0"][1])

    def test_dense_families(self):
        for family in DENSE:
            self.check_family(family, 1, (0, 5, 1))

    def test_families_with_experts_and_one_worker(self):
        for family in EXPERTS:
            self.check_family(family, 1, (0, 5, 1))

    def test_families_with_experts_and_two_workers(self):
        for family in EXPERTS:
            self.check_family(family, 2, (0,))

    def test_families_with_experts_and_three_workers(self):
        for family in EXPERTS:
            self.check_family(family, 3, (5,))

    # Default mode: BF16 rows to the experts and BF16 keys and values. Rows whose experts flip are far off,
    # so the median row counts; the README states what is measured.
    def test_default_mode_stays_near(self):
        for family, bound in DEFAULT_MODE_MEDIAN.items():
            reference = golden_client.expected(family)
            errors = []
            with self.subTest(family), golden_client.serve(harness.golden(family), parity=False) as server:
                for name in ("seq0", "seq1"):
                    got, _ = golden_client.score(server, safetensors_io.values(reference[f"{name}.ids"]))
                    errors += golden_client.row_errors(got, safetensors_io.rows(reference[f"{name}.logits"]))
                median = statistics.median(errors)
                print(f"default mode, {family}: median row {median:.4f}, worst row {max(errors):.4f}")
                self.assertLess(median, bound)

    def test_long_prompt(self):
        for family in ("llama", "deepseek_v3"):
            reference = golden_client.expected(family)
            ids = safetensors_io.values(reference["seq2.ids"])
            with self.subTest(family), golden_client.serve(harness.golden(family), "--max-step-rows=64") as server:
                got, _ = golden_client.score(server, ids)
                tail = safetensors_io.rows(reference["seq2.logits_tail"])
                golden_client.assert_logits(self, got[len(ids) - len(tail):], tail, family)


if __name__ == "__main__":
    unittest.main()
