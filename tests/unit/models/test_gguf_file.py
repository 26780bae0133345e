"""The GGUF container reader: agrees with the gguf package, and survives any damage with a sentence."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.models.errors import ModelError
from kvmesh.models.gguf_file import GgufFile


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_uint32("a.uint32", 7)
    writer.add_int8("a.int8", -3)
    writer.add_uint64("a.uint64", 1 << 40)
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.25)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "grüße")
    writer.add_array("a.strings", ["x", "", "日本"])
    writer.add_array("a.ints", [1, 2, 3])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    quantized = gguf.quants.quantize(
        np.linspace(-1, 1, 96, dtype=np.float32).reshape(3, 32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("blocks", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_metadata_and_tensors_equal_the_reference_reader(path: Path) -> None:
    ours, reference = GgufFile(path), gguf.GGUFReader(path)
    for key, field in reference.fields.items():
        if key.startswith("GGUF."):
            continue
        value, expected = ours.metadata[key], field.contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected
    assert [*ours.tensors] == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert found.type == int(tensor.tensor_type)
        assert ours.bytes_of(found, tensor.n_bytes).tobytes() == tensor.data.tobytes()


def test_not_a_model_file(tmp_path: Path) -> None:
    for content in (b"", b"GGUF", b"PK\x03\x04" + bytes(64)):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ModelError):
            GgufFile(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match="Cannot read"):
        GgufFile(tmp_path / "absent.gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(64))
    with pytest.raises(ModelError, match="version 9"):
        GgufFile(tmp_path / "x.gguf")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_an_error_or_harmless(data: Any, path: Path, tmp_path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content)
    with suppress(ModelError):
        file = GgufFile(broken)
        for tensor in file.tensors.values():
            file.bytes_of(tensor, tensor.num_elements)
