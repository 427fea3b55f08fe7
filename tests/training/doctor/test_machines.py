"""Machines by name, and what compiling for them takes."""

import jax
import pytest

from jaxformer.training.devices import DEVICES
from jaxformer.training.doctor import machines
from jaxformer.training.doctor.machines import Target, devices_of, missing, parse_target


@pytest.mark.parametrize("text", ["gpu:h100:8", "tpu:v5e:4x4", "tpu:v4:2x2x1", "cpu:8", "cpu:1"])
def test_a_target_is_what_it_is_called(text):
    assert str(parse_target(text)) == text


def test_of_each_accelerator_there_are_figures():
    for name, device in DEVICES.items():
        target = parse_target(f"{name}:2")
        assert target.device is device and device.source.startswith("https://")
    assert parse_target("tpu:v5e:4x4").count == 16 and parse_target("cpu:8").device is None


@pytest.mark.parametrize(
    "text", ["gpu:8", "gpu:a1:8", "gpu:h100:2x4", "tpu:v5e:0x4", "cpu", "", "h100"]
)
def test_another_target_is_refused(text):
    with pytest.raises(
        ValueError, match=r"it must be of the form of one of gpu:h100:8, tpu:v4:2x2x1"
    ):
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
def test_a_missing_compiler_is_named_with_how_to_install_it(monkeypatch, text, command):
    monkeypatch.setattr(machines, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="whose compiler is not installed") as refused:
        devices_of(parse_target(text))
    assert command in str(refused.value)
    assert missing(parse_target("cpu:8")) is None


def test_more_devices_than_jax_has_started_with():
    count = jax.device_count("cpu") + 1
    with pytest.raises(ValueError, match=f"JAX has started with {count - 1}"):
        devices_of(Target("cpu", (count,)))
