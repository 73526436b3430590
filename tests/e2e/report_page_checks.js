// Looked at by test_report_page.py in the page: which texts nobody can read.

// Placeholders, choices, labels and headings that are cut off, as long as nobody scrolls sideways.
function cutTexts() {
  const pen = document.createElement("canvas").getContext("2d");
  const isSeen = (box) => box.offsetParent !== null && !box.closest(".rows, .toks");
  const seen = (selector) => [...document.querySelectorAll(selector)].filter(isSeen);
  const cut = [];
  for (const box of seen("input, select")) {
    const style = getComputedStyle(box), isList = box.tagName === "SELECT";
    const room = box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - (isList ? 16 : 0); // its arrow
    pen.font = `${style.fontSize} ${style.fontFamily}`;
    const choices = isList ? [...box.options].map((option) => option.text) : [box.placeholder || ""];
    const texts = choices.filter((text) => text.length <= 20); // what tools call their errors may be of any length
    cut.push(...texts.filter((text) => pen.measureText(text).width > room));
  }
  for (const box of seen("button, label, h1, h2, dt, dd, .filter, .tile, .status span, .legend, summary")) {
    const { left, right } = box.getBoundingClientRect();
    const overflows = box.clientWidth > 0 && box.scrollWidth > box.clientWidth + 1;
    if (overflows || left < -1 || right > innerWidth + 1) cut.push(box.innerText);
  }
  if (document.documentElement.scrollWidth > innerWidth) cut.push("the page scrolls sideways");
  return cut;
}

// Texts whose contrast with what is behind them is below 4.5, by the formula of WCAG 2.1, and how many were measured.
function paleTexts() {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  pen.canvas.width = pen.canvas.height = 1;
  const known = {}, pale = [];
  let measured = 0;

  function rgba(colour) {
    if (!known[colour]) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
      known[colour] = [...pen.getImageData(0, 0, 1, 1).data];
    }
    return known[colour];
  }
  const over = (top, ground) => [0, 1, 2].map((i) => (top[i] * top[3] + ground[i] * (255 - top[3])) / 255);
  function groundOf(node) {
    if (node === null) return [255, 255, 255];
    return over(rgba(getComputedStyle(node).backgroundColor), groundOf(node.parentElement));
  }
  const opacityOf = (node) => (node === null ? 1 : +getComputedStyle(node).opacity * opacityOf(node.parentElement));
  function light(colour) {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }
  function measure(node, colour, text) {
    measured++;
    const ground = groundOf(node);
    const [low, high] = [light(over(rgba(colour), ground)), light(ground)].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5 || opacityOf(node) < 1) pale.push(`${text}: ${contrast.toFixed(2)}`);
  }

  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), node = walker.currentNode.parentElement;
    if (!text || !node.getClientRects().length || node.closest("script, noscript, option")) continue;
    const style = getComputedStyle(node);
    measure(node, node instanceof SVGElement ? style.fill : style.color, text);
  }
  for (const node of document.querySelectorAll("input, select")) {
    if (!node.getClientRects().length) continue;
    measure(node, getComputedStyle(node).color, node.ariaLabel);
    if (node.placeholder) measure(node, getComputedStyle(node, "::placeholder").color, node.placeholder);
  }
  return { pale, measured };
}
