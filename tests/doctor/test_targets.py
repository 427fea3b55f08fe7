"""Names of compilation targets, and their compilers."""

import jax
import pytest

from jaxformer.doctor import targets
from jaxformer.doctor.targets import Target, missing_compiler, parse_target, target_devices
from jaxformer.training.devices import DEVICES


@pytest.mark.parametrize("text", ["gpu:h100:8", "tpu:v5e:4x4", "tpu:v4:2x2x1", "cpu:8", "cpu:1"])
def test_compilation_target_parsed_from_text_prints_the_same_text(text):
    assert str(parse_target(text)) == text


def test_each_accelerator_has_published_specifications():
    for name, device in DEVICES.items():
        target = parse_target(f"{name}:2")
        assert target.device is device and device.source.startswith("https://")
    assert parse_target("tpu:v5e:4x4").count == 16 and parse_target("cpu:8").device is None


@pytest.mark.parametrize(
    "text", ["gpu:8", "gpu:a1:8", "gpu:h100:2x4", "tpu:v5e:0x4", "cpu", "", "h100"]
)
def test_parse_target_rejects_invalid_text(text):
    with pytest.raises(ValueError, match=r"it must look like one of gpu:h100:8, tpu:v4:2x2x1"):
        parse_target(text)


@pytest.mark.parametrize(
    "text, command",
    [
        ("tpu:v5e:4x4", 'pip install "libtpu=='),
        (
            "gpu:h100:8",
            f"pip install --no-deps jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt==",
        ),
    ],
)
def test_a_missing_compiler_is_reported_with_an_install_command(monkeypatch, text, command):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="but its compiler is not installed") as refused:
        target_devices(parse_target(text))
    assert command in str(refused.value)
    assert missing_compiler(parse_target("cpu:8")) is None


def test_more_cpu_devices_than_jax_has_are_rejected():
    count = jax.device_count("cpu") + 1
    with pytest.raises(ValueError, match=f"JAX has started with {count - 1}"):
        target_devices(Target("cpu", (count,)))
