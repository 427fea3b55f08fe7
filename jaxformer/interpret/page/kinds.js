// Kinds of model that run in the page, and the functions that return their values.

import { convolutionValues } from "./convolution.js";
import { encoderDecoderValues } from "./encoder_decoder.js";
import { liveValues } from "./live.js";
import { recurrentPairValues, recurrentValues } from "./recurrent_values.js";

/** The function that creates the values of a live page, by the name of the architecture. */
export const LIVE_KINDS = {
  decoder: liveValues,
  encoder: liveValues,
  "encoder-decoder": encoderDecoderValues,
  recurrent: recurrentValues,
  "recurrent-encoder-decoder": recurrentPairValues,
  convolutional: convolutionValues,
};
