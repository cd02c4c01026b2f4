"""The committed server/pb is what server/proto generates."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from server.pb.jaxserve.v1 import generation_pb2 as pb

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "scripts" / "build_protos.py"
COMMITTED = ROOT / "server" / "pb"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    output = tmp_path_factory.mktemp("protos")
    subprocess.run([sys.executable, str(BUILD), "--output", str(output)], check=True)
    return output / "server" / "pb"


def test_the_committed_descriptor_is_the_protos(tmp_path: Path) -> None:
    """Whatever version of the tools: the same messages, fields, numbers and methods."""
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    path = tmp_path / "set"
    proto = "server/pb/jaxserve/v1/generation.proto"
    arguments = [f"-Iserver/pb={ROOT / 'server' / 'proto'}", f"--descriptor_set_out={path}", proto]
    assert protoc.main(["protoc", *arguments]) == 0
    (fresh,) = FileDescriptorSet.FromString(path.read_bytes()).file
    committed = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    for message in fresh.message_type:
        for field in [*message.field, *(field for nested in message.nested_type for field in nested.field)]:
            field.ClearField("json_name")
    assert fresh == committed


def test_the_committed_files_are_the_generated_ones(generated: Path) -> None:
    text = (COMMITTED / "jaxserve" / "v1" / "generation_pb2_grpc.py").read_text()
    made_with = re.search(r"GRPC_GENERATED_VERSION = '(.*)'", text)
    assert made_with is not None
    if made_with[1] != version("grpcio-tools"):
        pytest.skip(f"server/pb was made with grpcio-tools {made_with[1]}, this is {version('grpcio-tools')}")
    for path in sorted(generated.rglob("*.py*")):
        assert path.read_text() == (COMMITTED / path.relative_to(generated)).read_text(), path.name
