"""The small files of a run folder remain readable after a kill, with the written values."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.artifacts.run import RUN_FORMAT, RunFolder, read_sections
from jaxformer.models.config.check import shown
from tests.errors import error_of

SAMPLES = {2: "été\n---- step 9999\n猫 \x85", 4: "\r\u2028é\n---- step 9 of it", 12: "😀"}
METRICS = [{"step": step, "loss": step + 0.5} for step in (2, 4, 12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return RunFolder(tmp_path_factory.mktemp("run"))


lines = st.sampled_from(["", " ", "  ", "x"]).map(lambda before: f"{before}---- step 9999")


@given(samples=st.dictionaries(st.integers(0, 99), st.text() | st.lists(lines).map("\n".join)))
@example(samples=SAMPLES)
def test_written_text_samples_are_read_unchanged(folder, samples):
    """A sample may contain lines that look like the header of another sample."""
    folder.samples.unlink(missing_ok=True)
    for step, text in samples.items():
        folder.add_sample(step, text)
    assert folder.read_samples() == list(samples.items())


@pytest.mark.parametrize("step", [1, 2, 4, 12])
def test_complete_lines_of_a_truncated_samples_file_are_kept(folder, step):
    """Complete samples up to the step remain; a header without a text is not a sample."""
    folder.samples.unlink(missing_ok=True)
    begins, ends = [], []  # (step, offset) of each sample; end of each line that is no header
    for number, text in SAMPLES.items():
        begins.append((number, folder.samples.stat().st_size if begins else 0))
        folder.add_sample(number, text)
        whole = folder.samples.read_bytes()
        header = begins[-1][1] + len(f"---- step {number}\n")
        ends += [i + 1 for i in range(header, len(whole)) if whole[i] == ord("\n")]
    later = min((begin for number, begin in begins if number > step), default=len(whole))
    for cut in range(len(whole) + 1):
        folder.samples.write_bytes(whole[:cut])
        folder.cut_after(step)
        kept = max((end for end in ends if end <= min(cut, later)), default=0)
        assert folder.samples.read_bytes() == whole[:kept]


@pytest.mark.parametrize("step", [1, 2, 4, 12])
def test_complete_lines_of_a_truncated_metrics_file_are_read(folder, step):
    """All complete lines can be read, even if the file ends within a character."""
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in METRICS]
    lines[1] = lines[1].replace("}", ', "text": "é猫"}')
    whole = "".join(lines).encode()
    for cut in range(len(whole) + 1):
        folder.metrics.write_bytes(whole[:cut])
        there = [json.loads(line) for line in lines if whole[:cut].count(line.encode())]
        assert folder.read_metrics() == there
        folder.cut_after(step)
        assert folder.read_metrics() == [line for line in there if line["step"] <= step]


@pytest.mark.parametrize("version", [RUN_FORMAT - 1, RUN_FORMAT + 1, str(RUN_FORMAT), True, None])
def test_run_config_with_unsupported_format_version_is_rejected(tmp_path, version):
    content = {"format": version, "kind": "decoder", "model": {}, "training": {}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    for read in (jf.load, read_sections, lambda path: RunFolder(path).read_config()):
        said = error_of(read, tmp_path)
        assert f"has format {shown(version)}; this version of jaxformer reads {RUN_FORMAT}" in said
