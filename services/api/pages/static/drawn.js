// Draws pictures of the kind that the embedded vision model reads: shapes, or a number, on a grid of four by four cells.
const CELL = 32, GRID = 4, MOST_SHAPES = 9;
const SHADES = {red: [215, 45, 45], green: [45, 160, 65], blue: [45, 85, 215], yellow: [235, 195, 35]};
const KINDS = ["circle", "square", "triangle"];
const between = (low, high) => low + Math.random() * (high - low);
const pick = (choices) => choices[Math.floor(Math.random() * choices.length)];

function blank() {
  const canvas = make("canvas");
  canvas.width = canvas.height = CELL * GRID;
  const pen = canvas.getContext("2d");
  const ground = Math.round(between(215, 248));
  pen.fillStyle = `rgb(${ground} ${ground} ${ground})`;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  return {canvas, pen};
}

function drawShape(pen, kind, colour, left, top) {
  const half = between(17, 28) / 2, side = 0.9 * half;
  const shade = SHADES[colour].map((part) => Math.round(part + between(-18, 18)));
  pen.save();
  pen.fillStyle = `rgb(${shade.join(" ")})`;
  pen.translate(left + between(half + 1, CELL - half - 1), top + between(half + 1, CELL - half - 1));
  if (kind !== "circle") pen.rotate(between(-0.2, 0.2));
  pen.beginPath();
  if (kind === "circle") pen.arc(0, 0, half, 0, 2 * Math.PI);
  if (kind === "square") pen.rect(-side, -side, 2 * side, 2 * side);
  if (kind === "triangle") [[-half, half], [half, half], [0, -half]].forEach(([x, y]) => pen.lineTo(x, y));
  pen.fill();
  pen.restore();
}

function drawnShapes() {
  const {canvas, pen} = blank();
  const cells = Array.from({length: GRID * GRID}, (_, cell) => cell).sort(() => Math.random() - 0.5);
  const shown = cells.slice(0, 1 + Math.floor(between(0, MOST_SHAPES))).sort((a, b) => a - b).map((cell) => {
    const kind = pick(KINDS), colour = pick(Object.keys(SHADES));
    drawShape(pen, kind, colour, CELL * (cell % GRID), CELL * Math.floor(cell / GRID));
    return `${colour} ${kind}`;
  });
  return {canvas, shows: shown.join(", ")};
}

function drawnNumber() {
  const {canvas, pen} = blank();
  const digits = Array.from({length: 1 + Math.floor(between(0, GRID))}, () => Math.floor(between(0, 10)));
  const start = Math.floor(between(0, GRID - digits.length + 1)), row = Math.floor(between(0, GRID));
  pen.fillStyle = "rgb(30 30 60)";
  pen.font = `${Math.round(between(23, 28))}px sans-serif`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  digits.forEach((digit, index) => pen.fillText(digit, CELL * (start + index + 0.5) + between(-4, 4), CELL * (row + 0.5) + between(-3, 3)));
  return {canvas, shows: `the number ${digits.join("")}`};
}

// In place of all other pictures.
function attachDrawn({canvas, shows}) {
  const url = canvas.toDataURL("image/png");
  pictures = [{name: `Drawn: ${shows}`, url, bytes: url.length * 3 / 4}];
  drawPictures();
  notePictures("Drawn by this page.");
}
