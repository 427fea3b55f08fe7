// Titles, sizes and explanations of the parts of the drawing.

export const norms = { layer: "LayerNorm", rms: "RMSNorm", rms_one_plus: "RMSNorm", dynamic_tanh: "Dynamic tanh", none: "No norm" };
const countText = (x) => (x ?? 0).toLocaleString("en");
const plural = (num, word) => `${countText(num)} ${word}${num === 1 ? "" : "s"}`;

/** Returns {title, sub, about} of a part outside the layers, with defaults for unknown parts. */
export function partText(name, facts) {
  const width = facts.embed_dim;
  const norm = norms[facts.norm] ?? "Norm";
  const known = {
    "embedding.tokens": ["Token embedding", `${countText(facts.vocab_size)} tokens × ${width} numbers`,
      `A table with one row for each token of the vocabulary. A token becomes a vector of ${width} numbers, which the layers then change.`],
    embedding_norm: [norm, "after the embedding", "The embedding is normalised before the first layer."],
    norm: [norm, "one scale for each number", "A norm gives each token's vector a standard size, and then multiplies each number by a learned scale γ. This keeps training stable."],
    final_norm: [`Final ${norm}`, "after the last layer", "The last state of each token is normalised before the output head reads it."],
    transform: ["Transform", `${width} → ${width} numbers`, "One more linear map and activation before the output head of an encoder."],
    transform_norm: [norm, "after the transform", "The transformed vectors are normalised before the output head reads them."],
    pooler: ["Pooler", "first token → one vector of the text", "A linear map and tanh of the first token's vector. Classifiers of whole texts read it; the prediction of tokens does not."],
    head: ["Output head", `${width} numbers → ${countText(facts.vocab_size)} logits`,
      `The head gives each token of the vocabulary a logit: how well it fits here. ${facts.tie_embeddings ? "It uses the table of the token embedding, so it has no matrix of its own." : "It has a matrix of its own."}`],
  }[name];
  const [title, sub, about] = known ?? [wordsOf(name), "", "A part of this model's weights."];
  return { title, sub, about };
}

/** Returns the text of the part that tells the model where a token stands. */
export function positionText({ positions, max_length: most, embed_dim: width }) {
  const added = "Without it, the model would not know the order of the tokens. It is added to the token's vector.";
  const [title, sub, about] = {
    learned: ["Position vectors", `${countText(most)} positions × ${width} numbers`, `Each position has a learned vector. ${added}`],
    sinusoidal: ["Positions: sines and cosines", "added; nothing is learned", `Each position has a vector of sines and cosines. ${added}`],
    sinusoidal_halves: ["Positions: sines and cosines", "added; nothing is learned", `Each position has a vector of sines and cosines. ${added}`],
    rotary: ["Positions: rotary", "rotates queries and keys in each layer", "Queries and keys are rotated by angles that grow with the position, so a score depends on the distance of two tokens."],
    alibi: ["Positions: ALiBi", "lowers scores of distant tokens", "Each head subtracts its slope times the distance from the scores of its keys."],
    relative: ["Relative positions", "a learned bias for each distance", "Each head adds a learned number to a score. The number depends on the distance of the two tokens."],
  }[positions] ?? ["Positions", "", "The vectors of the positions."];
  return { title, sub, about };
}

/** Returns the text of a sub-layer in a layer. */
export function sublayerText(name, facts, layer) {
  const text = { attention: attentionText, cross_attention: crossText, feedforward: mlpText, recurrent: cellText, convolution: kernelText }[name];
  if (text) return text(facts, layer);
  const about = { short_convolution: "A gated convolution over the last few tokens.", gated_delta: "A linear attention with a state of fixed size, which each token updates." }[name];
  return { title: wordsOf(name), sub: "mixes the tokens", about: about ?? "A part of this layer." };
}

const headsText = ({ num_heads: heads, num_kv_heads: keys, head_dim: dim }) =>
  `${plural(heads, "head")} × ${dim} numbers${keys && keys !== heads ? `, ${plural(keys, "key head")}` : ""}`;

const attentionText = (facts) => ({
  title: "Attention", sub: headsText(facts),
  about: `Each token gathers information from ${facts.bidirectional ? "all tokens" : "itself and the tokens before it"}. ${facts.num_heads === 1 ? "The only head" : `Each of the ${facts.num_heads} heads`} decides by scores which tokens to read.`,
});

const crossText = (facts) => ({
  title: "Cross-attention", sub: facts.num_heads ? headsText(facts) : "reads the encoder's vectors",
  about: "Each token of the target gathers information from the tokens of the source, as the encoder left them.",
});

const mlpText = ({ embed_dim: width, mlp_dim: hidden, activation = "", num_experts: experts, experts_per_token: chosen }) => ({
  title: "Feed-forward (MLP)", short: "MLP",
  sub: experts ? `${plural(experts, "expert")}, ${chosen} for each token` : `${width} → ${countText(hidden)} → ${width}, ${activation.replaceAll("_", " ")}`,
  about: "This part works on each token alone: a linear map to hidden features, an activation, and a linear map back.",
});

const cellText = ({ cell = "rnn", hidden_dim: hidden, embed_dim: width }) => ({
  title: `${cell.toUpperCase()} cell`, sub: `state of ${hidden ?? width} numbers`,
  about: cell === "lstm"
    ? "The cell reads the tokens one after another and passes its state on to the next token. Three gates decide what its state forgets, takes in, and shows."
    : "The cell reads the tokens one after another. Its new state is a function of the token and of its last state.",
});

const kernelText = ({ kernel_size: size = 1, dilation_growth: growth = 1 }, layer) => {
  const apart = growth ** layer;
  const reach = (size - 1) * apart;
  return {
    title: "Convolution", sub: `this token and ${size - 1} earlier, up to ${reach} back`,
    about: `Each token reads ${size} tokens${apart > 1 ? `, ${apart} apart` : ""}: itself and earlier ones. More layers see further back.`,
  };
};

function wordsOf(name) {
  const words = name.replaceAll(/[._]/g, " ");
  return words[0].toUpperCase() + words.slice(1);
}
