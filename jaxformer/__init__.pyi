"""The public names of the package, which are imported on first use."""

from . import (
    artifacts as artifacts,
    bench as bench,
    decoding as decoding,
    doctor as doctor,
    functional as functional,
    hub as hub,
    interpret as interpret,
    models as models,
    training as training,
    verify as verify,
)
from .artifacts.saved import save as save
from .decoding.autoregressive import (
    extend as extend,
    inspect as inspect,
    pack_weights as pack_weights,
    init_cache as init_cache,
)
from .decoding.beam import Hypotheses as Hypotheses, beam_search as beam_search
from .decoding.generate import Generation as Generation, generate as generate
from .decoding.grammars import (
    Grammar as Grammar,
    json_schema as json_schema,
    lark_grammar as lark_grammar,
    regular_expression as regular_expression,
)
from .decoding.sampling import Sampler as Sampler
from .decoding.score import score as score
from .decoding.stop_strings import StopStrings as StopStrings
from .functional.hooks import Edit as Edit, Patch as Patch, ablate as ablate
from .hub.export import export as export
from .hub.load import load as load
from .models.config import (
    ConvolutionalConfig as ConvolutionalConfig,
    DecoderConfig as DecoderConfig,
    EncoderConfig as EncoderConfig,
    EncoderDecoderConfig as EncoderDecoderConfig,
    Execution as Execution,
    RecurrentConfig as RecurrentConfig,
    RecurrentEncoderDecoderConfig as RecurrentEncoderDecoderConfig,
    RotaryScaling as RotaryScaling,
    preset as preset,
)
from .models.config.generation import (
    Constraints as Constraints,
    GenerationDefaults as GenerationDefaults,
)
from .models.kinds import (
    Convolutional as Convolutional,
    Decoder as Decoder,
    Encoder as Encoder,
    EncoderDecoder as EncoderDecoder,
    Recurrent as Recurrent,
    RecurrentEncoderDecoder as RecurrentEncoderDecoder,
    build as build,
)
from .models.lora import merge_adapter as merge_adapter
from .models.parameters import parameter_count as parameter_count
from .runtime import tune_cpu_runtime as tune_cpu_runtime

__version__: str
