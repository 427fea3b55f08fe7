"""Public names of this package, each of which is imported on first use."""

from .ablation import (
    Ablation as Ablation,
    ablate_heads as ablate_heads,
    ablate_sets as ablate_sets,
    head_sets as head_sets,
)
from .alignment import (
    Alignment as Alignment,
    AlignmentSettings as AlignmentSettings,
    train_alignment as train_alignment,
)
from .atlas import (
    AtlasHistory as AtlasHistory,
    AtlasSettings as AtlasSettings,
    HeadAtlas as HeadAtlas,
    atlas_over_checkpoints as atlas_over_checkpoints,
    head_atlas as head_atlas,
)
from .attention import (
    AttentionMaps as AttentionMaps,
    attention_maps as attention_maps,
    describe as describe,
    draw_attention as draw_attention,
)
from .attribution import (
    Attribution as Attribution,
    Gradients as Gradients,
    InputGradient as InputGradient,
    attribute as attribute,
    input_gradients as input_gradients,
    state_norms as state_norms,
)
from .attribution_patching import attribution_sweep as attribution_sweep
from .autoencoders import (
    SparseAutoencoder as SparseAutoencoder,
    load_autoencoder as load_autoencoder,
    splice as splice,
)
from .circuits import CircuitSweep as CircuitSweep, evaluate_circuits as evaluate_circuits
from .edge_attribution import attribute_edges as attribute_edges
from .edges import EdgeSweep as EdgeSweep, patch_edges as patch_edges
from .encoded_text import EncodedText as EncodedText, encode_text as encode_text
from .explanation import Page as Page, explain as explain
from .graph import (
    Edge as Edge,
    Node as Node,
    edges_between as edges_between,
    model_edges as model_edges,
)
from .head_circuits import (
    Composition as Composition,
    TokenCircuits as TokenCircuits,
    composition_scores as composition_scores,
    copying_scores as copying_scores,
    token_circuits as token_circuits,
)
from .interchange import (
    InterchangePairs as InterchangePairs,
    InterchangeSite as InterchangeSite,
    interchange as interchange,
    interchange_accuracy as interchange_accuracy,
    interchange_patch as interchange_patch,
)
from .lens import (
    Lens as Lens,
    Translators as Translators,
    jacobian_lens as jacobian_lens,
    logit_lens as logit_lens,
    train_tuned_lens as train_tuned_lens,
)
from .linear_heads import HeadWeights as HeadWeights, head_weights as head_weights
from .neurons import (
    NeuronAttribution as NeuronAttribution,
    TopUnits as TopUnits,
    attribute_neurons as attribute_neurons,
)
from .patching import LogitDifference as LogitDifference, LogProbability as LogProbability
from .pictures import atlas_figure as atlas_figure, history_figure as history_figure
from .probes import Probes as Probes, train_probes as train_probes
from .scores import (
    CrossScores as CrossScores,
    HeadScores as HeadScores,
    ScoreSettings as ScoreSettings,
    cross_scores as cross_scores,
    head_scores as head_scores,
)
from .sweep import Sweep as Sweep, patch_sweep as patch_sweep
from .texts import next_token_batch as next_token_batch, repeated_batch as repeated_batch
