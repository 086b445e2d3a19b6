"""A Python gRPC client against a whole server, with stubs made from the .proto at test time."""

import pathlib
import sys
import tempfile
import unittest

import harness

try:
    import grpc
    import grpc_tools.protoc
except ImportError:
    grpc = None


def make_stubs(directory):
    """Generates and imports the public API's Python modules."""
    root = harness.ROOT / "proto"
    code = grpc_tools.protoc.main([
        "protoc", f"-I{root}", f"--python_out={directory}", f"--grpc_python_out={directory}",
        str(root / "tandem/serving/v1/inference.proto")])
    if code != 0:
        raise RuntimeError(f"protoc ended with {code}")
    sys.path.insert(0, directory)
    from tandem.serving.v1 import inference_pb2, inference_pb2_grpc
    return inference_pb2, inference_pb2_grpc


@unittest.skipIf(grpc is None, "grpcio and grpcio-tools are not installed")
class GrpcClient(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stub_dir = tempfile.TemporaryDirectory()
        cls.pb, services = make_stubs(cls.stub_dir.name)
        cls.server = harness.Server()
        cls.channel = grpc.insecure_channel(f"127.0.0.1:{cls.server.grpc_port}")
        cls.stub = services.InferenceServiceStub(cls.channel)

    @classmethod
    def tearDownClass(cls):
        cls.channel.close()
        cls.server.stop()
        cls.stub_dir.cleanup()

    def request(self, **fields):
        request = self.pb.GenerateRequest(**fields)
        request.chat.messages.add(role="user", content="What is 17 + 25?")
        request.sampling.temperature = 0
        return request

    def test_generate_streams_an_answer(self):
        responses = list(self.stub.Generate(self.request(request_id="from-python"), timeout=60))
        self.assertIn("42", "".join(r.text_delta for r in responses))
        last = responses[-1]
        self.assertEqual(last.finish_reason, self.pb.FINISH_REASON_STOP)
        self.assertEqual(last.usage.completion_tokens, sum(len(r.token_ids) for r in responses))
        self.assertEqual({r.request_id for r in responses}, {"from-python"})

    def test_token_ids_and_logprobs(self):
        request = self.pb.GenerateRequest(token_ids=self.pb.TokenIds(ids=[5, 6, 7]), top_logprobs=2,
                                          prompt_logprobs=True)
        request.stopping.max_tokens = 3
        request.sampling.temperature = 0
        responses = list(self.stub.Generate(request, timeout=60))
        self.assertEqual(sum(len(r.prompt_logprobs) for r in responses), 2)
        for response in responses:
            self.assertEqual(len(response.logprobs), len(response.token_ids))

    def test_tokenize_and_model(self):
        ids = self.stub.Tokenize(self.pb.TokenizeRequest(text="Hello there"), timeout=60).ids
        self.assertEqual(self.stub.Detokenize(self.pb.DetokenizeRequest(ids=ids), timeout=60).text, "Hello there")
        model = self.stub.GetModel(self.pb.GetModelRequest(), timeout=60)
        self.assertTrue(model.has_tokenizer and model.has_chat_template)
        self.assertGreater(model.max_context_tokens, 0)

    def test_errors_are_statuses(self):
        request = self.request()
        request.sampling.top_p = 2
        with self.assertRaises(grpc.RpcError) as refused:
            list(self.stub.Generate(request, timeout=60))
        self.assertEqual(refused.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("top_p", refused.exception.details())
        trailing = dict(refused.exception.trailing_metadata())
        self.assertIn("x-request-id", trailing)
        self.assertIn(b"google.rpc.BadRequest", trailing["grpc-status-details-bin"])

    def test_cancelling_leaves_the_server_able(self):
        request = self.request()
        request.stopping.ignore_eos = True
        call = self.stub.Generate(request, timeout=60)
        next(call)
        call.cancel()
        self.assertIn("42", "".join(r.text_delta for r in self.stub.Generate(self.request(), timeout=60)))

    def test_health_and_reflection(self):
        try:
            from grpc_health.v1 import health_pb2, health_pb2_grpc
        except ImportError:
            self.skipTest("grpcio-health-checking is not installed")
        health = health_pb2_grpc.HealthStub(self.channel)
        for service in ("", "tandem.serving.v1.InferenceService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            self.assertEqual(answer.status, health_pb2.HealthCheckResponse.SERVING)
        # Reflection: the list of services, asked for on the raw method (its proto is not on every machine).
        reflect = self.channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=lambda raw: raw, response_deserializer=lambda raw: raw)
        list_services = b"\x3a\x01*"  # field 7, list_services
        answer = next(reflect(iter([list_services]), timeout=60))
        self.assertIn(b"tandem.serving.v1.InferenceService", answer)


if __name__ == "__main__":
    unittest.main()
