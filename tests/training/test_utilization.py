"""Model FLOPs utilisation: operations by formula, of what the devices could have done."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxformer.models.config import DecoderConfig
from jaxformer.models.flops import forward_flops
from jaxformer.training.batch import Batch
from jaxformer.training.config import TextTraining
from jaxformer.training.devices import DEVICES, device_of
from jaxformer.training.utilization import update_flops, utilization

CONFIG = TextTraining(
    DecoderConfig(vocab_size=64, max_length=16, num_layers=2, embed_dim=32, num_heads=2)
)


def test_an_update_is_three_times_what_its_rows_take():
    """Forward once, and two products for each one going back; micro-batches add up."""
    ids = np.zeros((3, 5, 16), np.int32)
    assert update_flops(CONFIG, Batch(ids, ids)) == 3 * 5 * 3 * forward_flops(CONFIG.model, 16)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu:h100"),
        ("TPU v4", "tpu:v4"),
        ("TPU v5 lite", "tpu:v5e"),
        ("TPU v5p", "tpu:v5p"),
        ("TPU v6 lite", "tpu:v6e"),
    ],
)
def test_the_share_is_of_all_devices(kind, name):
    assert device_of(kind) == DEVICES[name]
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind=kind)] * 4))
    half = {"model_flops_utilization": 0.5}
    assert utilization(2 * DEVICES[name].flops, mesh) == half


def test_of_a_device_without_figures_nothing_is_said():
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind="cpu")]))
    assert utilization(1e12, mesh) == {}
