// The state of the page as text for its address: "v1;tab=attention;pos=3;kind=0;layer=1;head=2".
//
// tokens=…  the ids in base 36, only if the text was edited
// source=…  the ids of the source in base 36, only if the source was edited
// s=…       layer/head/strength of each head whose strength is not 1; the layers of the decoder are
//           counted first, then those of cross-attention, then those of the encoder
// theme=…   only if the reader chose a theme

/** Returns the state of the page. */
export function stateOf(store, tabs) {
  const { selection, values, tokens, source, data } = store;
  const { position, kind, layer, head } = selection;
  const ifEdited = (ids, original) => (values.live && String(ids) !== String(original) ? [...ids] : null);
  return {
    tab: tabs.chosen.id, position, kind, layer, head,
    tokens: ifEdited(tokens, data.tokens), source: ifEdited(source, data.source),
    strengths: values.live ? [...values.strengths] : null,
    theme: document.documentElement.dataset.theme ?? null,
  };
}

/** Writes a state as text, without "#". `numHeads` is the number of heads of each layer. */
export function writeState(state, numHeads) {
  const parts = ["v1", `tab=${state.tab}`, `pos=${state.position}`, `kind=${state.kind}`, `layer=${state.layer}`, `head=${state.head}`];
  for (const name of ["tokens", "source"]) {
    if (state[name]) parts.push(`${name}=${state[name].map((id) => id.toString(36)).join(".")}`);
  }
  const changed = (state.strengths ?? []).flatMap((x, i) =>
    x === 1 ? [] : [`${Math.floor(i / numHeads)}/${i % numHeads}/${Number(x.toFixed(2))}`]);
  if (changed.length) parts.push(`s=${changed.join(",")}`);
  if (state.theme) parts.push(`theme=${state.theme}`);
  return parts.join(";");
}

/**
 * Reads the text of an address, without "#". Returns null for a word that is not a state, such as
 * "tour", {wrong} with the part that does not fit this page, or {state} with the given parts.
 */
export function readState(text, store, tabs) {
  const [version, ...parts] = text.split(";");
  if (!/^v\d+$/.test(version)) return null;
  if (version !== "v1") return { wrong: version };
  const found = {};
  for (const part of parts) {
    const [, name, value] = /^(\w+)=(.*)$/.exec(part) ?? [];
    if (!Object.hasOwn(READERS, name ?? "") || Object.hasOwn(found, name)) return { wrong: part };
    found[name] = value;
  }
  const state = {};
  for (const [name, read] of Object.entries(READERS)) { // in this order: later parts depend on earlier ones
    if (!(name in found)) continue;
    const value = read(found[name], { store, tabs, state });
    if (value === undefined) return { wrong: `${name}=${found[name].slice(0, 40)}` };
    state[FIELDS[name] ?? name] = value;
  }
  return { state };
}

const FIELDS = { pos: "position", s: "strengths" };

/** Returns a whole number below `end`, or undefined. */
const below = (text, end) => (/^\d{1,6}$/.test(text) && Number(text) < end ? Number(text) : undefined);

/** Returns at most `most` ids below `numIds`, or undefined. */
function readIds(text, most, numIds) {
  const ids = text.split(".").map((word) => (/^[0-9a-z]{1,6}$/.test(word) ? parseInt(word, 36) : numIds));
  return ids.length <= most && ids.every((id) => id < numIds) ? ids : undefined;
}

const READERS = {
  tab: (text, { tabs }) => tabs.views.find((view) => view.id === text)?.id,
  tokens: (text, { store: { values, data: { config } } }) =>
    values.live ? readIds(text, config.max_length, config.vocab_size) : undefined,
  source: (text, { store: { values, data: { source, config } } }) =>
    values.live && source ? readIds(text, config.max_source_length, config.source_vocab_size) : undefined,
  pos: (text, { store, state }) => below(text, (state.tokens ?? store.data.tokens).length),
  kind: (text, { store }) => below(text, Math.max(1, store.values.kinds.length)),
  layer: (text, { store, state }) => below(text, store.values.kinds[state.kind ?? 0]?.numLayers ?? 1),
  head: (text, { store, state }) => {
    const kind = store.values.kinds[state.kind ?? 0];
    if (text === "mean" || (text === "max" && !kind?.onlyMean)) return text;
    return kind?.onlyMean ? undefined : below(text, kind?.numHeads ?? 1);
  },
  s: (text, { store }) => {
    if (!store.values.live) return undefined;
    const { num_heads = 1 } = store.data.config;
    const strengths = new Array(store.values.strengths.length).fill(1);
    for (const item of text.split(",")) {
      const [, layer, head, strength] = /^(\d{1,4})\/(\d{1,4})\/([012](?:\.\d{1,2})?)$/.exec(item) ?? [];
      const index = layer * num_heads + Number(head);
      if (!(head < num_heads && index < strengths.length && strength <= 2)) return undefined;
      strengths[index] = Number(strength);
    }
    return strengths;
  },
  theme: (text) => (text === "dark" || text === "light" ? text : undefined),
};
