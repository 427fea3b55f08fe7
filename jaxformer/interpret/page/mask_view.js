// Fill a mask: an encoder predicts the token at each masked position of the text.

import { barList, button, card, el, note, percent } from "./dom.js";
import { nextTokens } from "./sampling.js";
import { disableFor } from "./reasons.js";

const MASK_BARS = 8;

/** Returns the view, or null for a page that does not run an encoder. */
export function maskView(store) {
  const { values, data } = store;
  if (!values.live || !data.config.bidirectional) return null;
  const view = { id: "mask", title: "Fill a mask" };
  if (data.mask === null) {
    const reason = "The tokenizer of this model has no mask token, so the page cannot mask a position. You can still replace tokens above.";
    view.element = card("Fill a mask", [note(reason)]);
    view.update = () => {};
    return view;
  }
  const hidden = new Map(); // the tokens that were masked, by position
  const name = store.name(data.mask);
  const edit = (change) => store.edit((tokens, position) => {
    change(tokens, position);
    return { tokens, first: position };
  });
  const maskAt = (tokens, position) => {
    if (tokens[position] !== data.mask) hidden.set(position, tokens[position]);
    tokens[position] = data.mask;
  };
  const best = (position) => shares(position).find(({ id }) => id !== data.mask).id;
  const shares = (position) => nextTokens(values.distribution(position), 1, 1);
  const mask = button(`Mask this token`, () => edit(maskAt));
  const fill = button("Fill in the best token", () => edit((tokens, position) => {
    if (tokens[position] === data.mask) tokens[position] = best(position);
  }));
  const buttons = [
    mask, fill,
    button("Back to the original text", () => store.setTokens(data.tokens, 0)),
  ];
  const about = el("p", {});
  const places = el("div", { class: "mask-places" });
  view.element = el("div", { class: "columns narrow" }, [
    card("Mask a token", [
      about, el("div", { class: "buttons" }, buttons),
      note(`In training, some tokens are replaced by ${name}, and the model learns to predict them from the tokens on both sides.`),
    ]),
    card("What the model fills in", [places]),
  ]);

  view.update = (what) => {
    if (what === "strengths" || what === "busy") return;
    const { position } = store.selection;
    const isMasked = store.tokens[position] === data.mask;
    about.textContent = `Selected: token ${position}, ${store.name(store.tokens[position])}.`;
    disableFor(mask, isMasked ? "This token is masked already." : null);
    disableFor(fill, isMasked ? null : "Mask the selected token first.");
    const masked = store.tokens.flatMap((id, i) => (id === data.mask ? [i] : []));
    for (const at of hidden.keys()) if (!masked.includes(at)) hidden.delete(at);
    if (!masked.length) return void places.replaceChildren(note("No token is masked. Select a token of the text and press “Mask this token”."));
    places.replaceChildren(...masked.map((at) => maskedPlace(store, at, shares(at), hidden.get(at))));
  };
  return view;
}

/** Returns the predictions at a masked position, and the probability of the token that was there. */
function maskedPlace(store, position, shares, original) {
  const rows = shares.slice(0, MASK_BARS).map(({ id, share }) =>
    ({ text: store.name(id), share, mark: id === original ? "original" : "" }));
  const title = `Token ${position}`;
  const rank = shares.findIndex(({ id }) => id === original);
  const said = rank < 0 ? ""
    : `The original token, ${store.name(original)}, has rank ${rank + 1} and probability ${percent(shares[rank].share)}.`;
  return el("section", { "data-position": position }, [
    el("h3", { class: "token-title", text: title }), barList(rows, `Predictions at token ${position}`), said ? note(said) : null,
  ].filter(Boolean));
}
