// Places the panel of the tour so that it does not cover the explained part of the page.

const PART_TOP = 16; // pixels above a part after the page was scrolled to it; `.toured` has this margin
const OUTLINE = 6; // pixels of the outline around a part
const PLACES = ["right", "left", "wide"]; // the lower corners, and the whole lower edge

/**
 * Puts the panel where it does not cover the first of the parts, after the page is scrolled to it.
 *
 * Returns the part. If each place covers a part, the next part is tried.
 */
export function placePanel(panel, parts) {
  for (const part of parts) {
    for (const place of PLACES) {
      panel.dataset.place = place;
      if (!coversPart(panel, part)) return part;
    }
  }
  panel.dataset.place = PLACES[0];
  return parts.at(-1);
}

function coversPart(panel, part) {
  const box = panel.getBoundingClientRect(), { left, right, height } = part.getBoundingClientRect();
  const isAbove = PART_TOP + height + OUTLINE <= box.top;
  return !isAbove && left - OUTLINE < box.right && right + OUTLINE > box.left;
}
