// Finds added tokens, such as <|endoftext|>, in a text before the text is split into words.

/**
 * Returns a function that splits a text into pieces {text, first} and {id}.
 *
 * If several added tokens begin at one position, the longest one is used. A special token counts as
 * plain text unless `parsesSpecial` is true.
 */
export function addedTokenFinder(tokens, parsesSpecial, word) {
  const byStart = new Map();
  for (const token of tokens.filter(({ sought }) => sought)) {
    const start = token.sought[0];
    if (!byStart.has(start)) byStart.set(start, []);
    byStart.get(start).push(token);
  }
  for (const list of byStart.values()) list.sort((a, b) => b.sought.length - a.sought.length);
  const isPlain = ({ special }) => special && !parsesSpecial;
  const wordBefore = new RegExp(`[${word}](?![^])`, "u"), wordAfter = new RegExp(`^[${word}]`, "u");
  const isWithinWord = (text, start, end) =>
    wordBefore.test(text.slice(Math.max(0, start - 2), start)) || wordAfter.test(text.slice(end, end + 2));

  return ({ text, first }) => {
    const pieces = [];
    let done = 0;
    const addText = (end) => {
      if (end > done) pieces.push({ text: text.slice(done, end), first: first && done === 0 });
    };
    for (let at = 0; at < text.length;) {
      const token = byStart.get(text[at])?.find(({ sought }) => text.startsWith(sought, at));
      const start = at;
      at += token ? token.sought.length : 1;
      if (!token || isPlain(token) || (token.single_word && isWithinWord(text, start, at))) continue;
      addText(token.lstrip ? Math.max(done, spacesBefore(text, start)) : start);
      pieces.push({ id: token.id });
      done = token.rstrip ? at + text.slice(at).match(/^\p{White_Space}*/u)[0].length : at;
    }
    addText(text.length);
    return pieces;
  };
}

/** Returns where the white space before a position starts. */
function spacesBefore(text, end) {
  while (end > 0 && /\p{White_Space}/u.test(text[end - 1])) end--;
  return end;
}
