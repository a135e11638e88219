// Names of what can be pressed, one first heading, no id twice, tables with headings, text that is told from its ground (WCAG 2.2 AA).
// A list of what is wrong.
() => {
  const found = [];
  const isShown = (node) => node.checkVisibility({ visibilityProperty: true }) && !node.closest('[aria-hidden=true], .unseen, dialog:not([open])');
  const short = (node) => node.outerHTML.slice(0, 160);
  for (const node of document.querySelectorAll('a[href], button, select, input, summary, [tabindex="0"]')) {
    if (!isShown(node)) continue;
    const label = node.getAttribute('aria-label') ?? (node.labels?.[0]?.textContent || node.textContent || node.title);
    if (!label.trim()) found.push(`no name: ${short(node)}`);
  }
  if (document.querySelectorAll('h1').length !== 1) found.push(`${document.querySelectorAll('h1').length} first headings`);
  const ids = [...document.querySelectorAll('[id]')].map((node) => node.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) found.push(`twice: ${id}`);
  for (const image of document.querySelectorAll('img')) if (!image.hasAttribute('alt')) found.push(`no alt: ${short(image)}`);
  for (const table of document.querySelectorAll('table')) if (!table.querySelector('th[scope=col]')) found.push(`no headings: ${short(table)}`);
  for (const canvas of document.querySelectorAll('canvas:not(.stroke)')) {
    if (!canvas.closest('[aria-label][tabindex="0"]')) found.push(`a picture without words or keys: ${short(canvas)}`);
  }
  const channels = (text) => text.match(/[\d.]+/g).map(Number);
  const light = ([red, green, blue]) => [red, green, blue].map((one) => one / 255).map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const [red, green, blue, alpha = 1] = channels(getComputedStyle(at).backgroundColor);
      if (alpha > 0.9) return [red, green, blue];
    }
    return channels(getComputedStyle(document.body).backgroundColor);
  };
  for (const node of document.querySelectorAll('body *')) {
    if (![...node.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim()) || !isShown(node) || node.closest(':disabled, option')) continue;
    const style = getComputedStyle(node);
    const [above, below] = [light(channels(style.color)), light(ground(node))].sort((a, b) => b - a);
    const ratio = (above + 0.05) / (below + 0.05);
    const isLarge = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) found.push(`contrast ${ratio.toFixed(2)}: ${short(node)}`);
  }
  return found;
}
