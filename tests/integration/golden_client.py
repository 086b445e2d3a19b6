"""Asks a served golden model what it computes: log-probabilities at every position, greedy tokens.

A golden model has no tokenizer: token ids go in and come out. Logits are only visible up to the constant
that log-softmax takes away, so both sides are compared as log-probabilities.
"""

import math

import harness
import safetensors_io

VOCAB = 256
RELATIVE = 1e-4  # of the largest logit


def serve(model, *options, env=None, parity=True):
    mode = ("--parity",) if parity else ()
    return harness.Server(model, *mode, f"--max-logprobs={VOCAB}", "--max-sequences=4",
                          "--kv-cache-tokens=2048", *options, env=env)


def expected(family):
    """The reference's tensors of a golden model."""
    return safetensors_io.read(harness.golden(family) / "expected.safetensors")


def log_softmax(row):
    top = max(row)
    total = math.log(sum(math.exp(value - top) for value in row)) + top
    return [value - total for value in row]


def complete(server, prompt, max_tokens, **fields):
    """Greedy, never ended by an end id unless told; the whole answer."""
    body = {"model": "", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": VOCAB, "return_token_ids": True, "return_tokens_as_token_ids": True, **fields}
    status, answer = server.post("/v1/completions", body, timeout=120)
    if status != 200:
        raise AssertionError(f"{status}: {answer}\n{server.log()}")
    return answer


def rows(choice):
    """The distributions in a choice, [positions][VOCAB]. With echo, row i is what follows token i."""
    found = []
    for entry in choice["logprobs"]["top_logprobs"]:
        if entry is None:  # nothing comes before the first token
            continue
        row = [None] * VOCAB
        for key, value in entry.items():
            row[int(key.removeprefix("token_id:"))] = value
        found.append(row)
    return found


def score(server, ids, max_tokens=1):
    """(rows from the first prompt position on, generated ids) of a prompt that is computed whole."""
    choice = complete(server, ids, max_tokens, echo=True)["choices"][0]
    return rows(choice), choice["token_ids"]


def row_errors(got, logits):
    """Largest difference of each row, as a part of the reference's largest logit."""
    largest = max(abs(value) for row in logits for value in row)
    return [max(abs(a - b) for a, b in zip(row, log_softmax(want))) / largest for row, want in zip(got, logits)]


def assert_logits(test, got, logits, message):
    """`got`: log-probabilities [T][VOCAB]; `logits`: the reference's [T or more][VOCAB]."""
    test.assertLess(max(row_errors(got, logits)), RELATIVE, message)


def assert_golden(test, server, family, reference, sequences=("seq0", "seq1")):
    """Every position's logits and the greedy tokens; returns {sequence: (rows, ids)}."""
    found = {}
    for name in sequences:
        ids = safetensors_io.values(reference[f"{name}.ids"])
        logits = safetensors_io.rows(reference[f"{name}.logits"])
        steps = safetensors_io.values(reference[f"{name}.greedy.ids"])
        got, generated = score(server, ids, len(steps))
        test.assertEqual(len(got), len(ids) + len(steps) - 1, f"{family} {name}")
        assert_logits(test, got[:len(ids)], logits, f"{family} {name}")
        test.assertEqual(generated, steps, f"{family} {name}")
        found[name] = (got, generated)
    return found
