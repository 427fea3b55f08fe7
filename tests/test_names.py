"""Names that a reader knows: each has one spelling, and the one before is nowhere."""

import re
from pathlib import Path

import pytest

import jaxformer as jf
from jaxformer.cli import VERBS
from jaxformer.cli.flags import list_flags
from jaxformer.cli.train_arguments import TrainArguments
from jaxformer.models.config import KINDS, DecoderConfig
from jaxformer.training.presets import training_preset, usual_preset

ROOT = Path(__file__).parents[1]
# A pattern of the earlier name, and the name that replaced it.
RENAMED = {
    r"\bjf\.start\b": "jf.init_cache",
    r"\bjf\.advance\b": "jf.extend",
    r"\bjf\.prepare\b": "jf.pack_weights",
    r"\bkeep_freed_memory\b": "jf.tune_cpu_runtime",
    r"\bsegments=": "segment_ids=",
    r"\bsource_segments\b": "source_segment_ids",
    r"\btoken_types=": "token_type_ids=",
    r"\battention_cap\b": "attention_softcap",
    r"\blogits_cap\b": "logits_softcap",
    r"\bmodel\.points\b": "model.hook_points",
    r"(?<!\.)\b[Tt]ap\(": "hook(",
    r"\b(two_norms|one_norm)\b": "separate_norms, shared_norm",
    r"\bHidden(Training|Tokens)\b": "MaskedTokensTraining",
    r"\bmodel\.family\b": "model.model_type",
    r"\blora_maps\b|--lora-maps": "lora_target_modules",
    r"\brules\.(of|asked)\b": "rules.model_rule, rules.mask_rule",
    r"\b(asked_of|subject_of)\b": "applicable_properties, certified_model",
    r"\bhub[./]foreign\b(?! import| as)(?<!tests.hub.foreign)(?<!tests/hub/foreign)": "huggingface",
    r"--accumulate\b": "--gradient-accumulation-steps",
    r"--held-out\b": "--validation-fraction",
    r"--average-decay\b": "--ema-decay",
    r"--keep\b(?!-)|--keep-every\b": "--max-to-keep, --keep-period",
    r"(?<!init)--from\b": "--init-from",
    r"(?<!max)--minutes\b": "--max-minutes",
    r"(?<!scan)--layers\b": "--scan-layers",
    r"jaxformer (fill|attention) ": "jaxformer fill-mask, jaxformer plot-attention",
}
# Speed is compared with versions that have the earlier names.
EXEMPT = {"tests/test_names.py", "experiments/bench_before.py"}
SOURCES = ("jaxformer/**/*.py", "tests/**/*.py", "docs/*.md", "experiments/*.*", "*.md")


@pytest.mark.slow
def test_former_names_of_renamed_identifiers_do_not_occur():
    earlier = re.compile("|".join(RENAMED))
    for glob in SOURCES:
        for path in ROOT.glob(glob):
            name = str(path.relative_to(ROOT))
            if name in EXEMPT or path.suffix not in (".py", ".md"):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                assert not earlier.search(line), f"{name}:{number}: {line.strip()}"


def test_public_names_include_terms_known_from_other_libraries():
    assert {"init_cache", "extend", "pack_weights", "tune_cpu_runtime"} <= set(jf.__all__)
    fields = set(DecoderConfig.__dataclass_fields__)
    assert {"attention_softcap", "logits_softcap", "parallel_block", "norm_position"} <= fields
    assert {"fill-mask", "plot-attention"} <= VERBS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_train_has_the_flag_names_of_other_training_tools(kind):
    preset = usual_preset(kind)
    default = TrainArguments(training_preset(preset, kind), kind=kind, preset=preset)
    names = {name for flag in list_flags(TrainArguments, default) for name in flag.names}
    assert names >= {
        *("--gradient-accumulation-steps", "--validation-fraction", "--ema-decay", "--max-to-keep"),
        *("--keep-period", "--init-from", "--max-minutes", "--lora-target-modules"),
        *("--scan-layers", "--attention-implementation"),
    }
