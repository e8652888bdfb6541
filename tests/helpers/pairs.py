"""Pairs of ground truth and answer, on a line each, that are the same or are not."""

# A pair is separated by ' | '.
EQUAL = r"""
1\frac12 | 3/2
-1\frac{1}{2} | -1.5
\text{Yes} | yes
\text{No} | no
odd | Odd
\mathbb{R} | (-\infty,\infty)
x \in \mathbb{R} | \mathbb{R}
5 | 5.
5 | 5.0
5 | $5
5 | \$5.00
5 | 5 dollars
5 | 5\text{ dollars}
1000000 | 10^6
9.11e-31 | 9.11\times 10^{-31}
2e27 | 2\times10^{27}
2e27 | 2 \cdot 10^{27}
2e27 | 2*10^27
2e27 | 2000000000000000000000000000
9. | 9
9. | 9.0
45° | 45
45° | 45^\circ
45° | 45^{\circ}
45° | 45 \text{ degrees}
\text{17} | 17
17 | \text{17}
D. | D
D. | \text{D}
D. | (D)
D. | d
\neq 5 | x \neq 5
\neq 5 | \neq 5
\neq 5 | x \ne 5
\neq 5 | (-\infty,5)\cup(5,\infty)
\neq 5 | \mathbb{R}\setminus\{5\}
x<5 | (-\infty,5)
x \in [-2,7] | [-2,7]
x \in [-2,7] | -2 \le x \le 7
[-2,7] | -2\leq x\leq 7
k \ge 2 | [2,\infty)
k \ge 2 | 2 \le k
k \geqslant 2 | k>=2
y = 2x+3 | 2x+3
y = 2x+3 | 2x - y + 3 = 0
y = 2x+3 | y - 2x = 3
y=2x+3 | y = 3+2x
x=5 | 5
x=5 | x = 5
5 | x=5
5 | 5=x
5 | n = 5
(1,2) | (1, 2)
(1,2) | \left(1,2\right)
(1,2) | (1,\ 2)
(1,2) | x=1, y=2
(1,2) | (x,y)=(1,2)
\{1,2\} | 1,2
\{1,2\} | 2, 1
\{1,2\} | \{2,1\}
1,2 | 2 and 1
1,2 | 1 \text{ or } 2
1,2 | x=1 or x=2
1,2 | x = 1, 2
1,2 | x_1 = 1, x_2 = 2
1,2 | x=1,\ x=2
1,2 | 1 \quad \text{and} \quad 2
\frac{1}{2} | 0.5
\frac{1}{2} | .5
\frac{1}{2} | 1/2
\frac{1}{2} | \frac12
\frac{1}{2} | \frac 1 2
\frac{1}{2} | \frac{\sqrt{4}}{4}
\frac{1}{2} | 50\%
\frac{1}{3} | 0.\overline{3}
\frac{1}{3} | 0.\overline{33}
\frac{\pi}{2} | \pi/2
\frac{\pi}{2} | \frac12\pi
\frac{\pi}{2} | 0.5\pi
\sqrt{2}/2 | \frac{1}{\sqrt{2}}
\sqrt{3} | 3^{1/2}
\sqrt{3} | 3^{0.5}
\sqrt{3} | sqrt(3)
\sqrt{3} | √3
3\sqrt{13} | \sqrt{117}
\frac{3\sqrt{3}}{4} | \frac{3}{4}\sqrt{3}
11\sqrt2 | 11*sqrt(2)
1 \pm \sqrt{19} | 1+\sqrt{19}, 1-\sqrt{19}
1 \pm \sqrt{19} | 1-\sqrt{19} \text{ and } 1+\sqrt{19}
1 \pm \sqrt{19} | x = 1 \pm \sqrt{19}
\{1\pm\sqrt{5},-2\} | -2, 1+\sqrt5, 1-\sqrt5
\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix} | \begin{bmatrix} -2 \\ -14 \\ -7 \end{bmatrix}
\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix} | (-2,-14,-7)
\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix} | \langle -2, -14, -7\rangle
\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix} | \begin{pmatrix} \frac15 \\ -\frac{18}{5} \end{pmatrix}
\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix} | \begin{pmatrix} 0.2 \\ -3.6 \end{pmatrix}
\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix} | \frac15\begin{pmatrix} 1 \\ -18 \end{pmatrix}
204_5 | 204_{5}
204_5 | 204_{\text{five}}
204_5 | (204)_5
204_5 | 204_{(5)}
137 \frac{1}{2} | 137.5
137 \frac{1}{2} | \frac{275}{2}
137 \frac{1}{2} | 275/2
1\frac{4}{5} | 9/5
1\frac{4}{5} | 1 4/5
\$18.90 | 18.9
\$18.90 | $18.90
\$18.90 | 18.90 \text{ dollars}
\$32,\!348 | 32348
\$32,\!348 | \$32,348
10,\!080 | 10080
10,\!080 | 10,080
5.4 \text{ cents} | 5.4
5.4 \text{ cents} | 5.4 cents
5.4 \text{ cents} | 5.4\mathrm{~cents}
864 \mbox{ inches}^2 | 864
864 \mbox{ inches}^2 | 864 \text{ in}^2
864 \mbox{ inches}^2 | 864 \text{ square inches}
864 \mbox{ inches}^2 | 864 square inches
864 \mbox{ inches}^2 | 864\ \text{inches}^{2}
15\mbox{ cm}^2 | 15\text{ cm}^2
15\mbox{ cm}^2 | 15 \, \text{cm}^2
15\mbox{ cm}^2 | 15\mathrm{cm}^2
15\mbox{ cm}^2 | 15 cm^2
15\mbox{ cm}^2 | 15 cm²
62.5% | 62.5
62.5% | 0.625
62.5% | \frac{5}{8}
62.5% | 62.5\%
62.5% | 62.5 percent
62.5% | 62.5 \text{ percent}
58,500 | 58500
58,500 | 58{,}500
58,500 | 5.85\times10^4
f(x)=2x | 2x
f(x)=2x | f(x) = x + x
f(x)=2x | f(x)=2x \text{ for all } x
(a+5)(b+2) | ab+2a+5b+10
(a+5)(b+2) | (b+2)(a+5)
6r^2-4r-24 | 2(3r^2-2r-12)
x^8 + x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x + 1 | \frac{x^9-1}{x-1}
\frac{n(n+1)}{2} | \frac{n^2+n}{2}
\binom{2n}{n} | \frac{(2n)!}{(n!)^2}
\binom{2n}{n} | {2n \choose n}
\lceil n / 2\rceil+1 | \lfloor (n+1)/2\rfloor+1
\cot x | \frac{\cos x}{\sin x}
\cot x | \cot(x)
\cot x | \frac{1}{\tan x}
\sqrt{2} \cos (2 t-\pi / 4) | \cos(2t)+\sin(2t)
\frac{1}{s+a} | (s+a)^{-1}
e^{t} / 3 | \frac{e^t}{3}
e^{t} / 3 | \frac{1}{3}\exp(t)
np.arcsin(10/13) | \arcsin(10/13)
np.arcsin(10/13) | \sin^{-1}(10/13)
np.arcsin(10/13) | \arcsin\left(\frac{10}{13}\right)
\frac{\log 2}{\log 2-\log 3} | \frac{\ln 2}{\ln(2/3)}
\frac{\log 2}{\log 2-\log 3} | \log_{2/3} 2
2,-\log _{10} 250 | -\log_{10}(250), 2
2 \pi / \omega | \frac{2\pi}{\omega}
I(0) e^{-\frac{t}{R C}} | I(0)e^{-t/(RC)}
\text{Evelyn} | Evelyn
\text{Evelyn} | \textbf{Evelyn}
\text{Evelyn} | evelyn
\text{ellipse} | an ellipse
\text{(B)} | B
\text{(B)} | (B)
C | \text{C}
C | C. 45 degrees
C | \textbf{(C)} 45
C | \textbf{(C)}\ 45
C | Option C
A | A)
1.39e9 | 1.39e+9
1.39e9 | 1,390,000,000
1.39e9 | 1.39E9
t(0,4] | (0,4]
$t(0,4]$ | t \in (0,4]
$221,$8$ | 221, 8
(4, \log _{10} 2) | (4, \log_{10}(2))
$(45^{\circ}, 60^{\circ}),(135^{\circ}, 60^{\circ})$ | (45°, 60°), (135°, 60°)
-1./3 | -\frac{1}{3}
.0000672 | 6.72\times10^{-5}
5x - 7y + 11z + 4 = 0 | -5x+7y-11z-4=0
5x - 7y + 11z + 4 = 0 | 5x-7y+11z=-4
\alpha | α
p - q | -q+p
1+274i | 274i+1
1+274i | 1+274 i
1+274i | 1 + 274\mathrm{i}
12\pi | 12 \pi \text{ cm}
2^{1009} | 2^{1009}
\frac{100!}{2^{50}} | \frac{100!}{2^{50}}
x=\frac{1}{6} \pi+\pi k, \frac{1}{3} \pi+\pi k | x = \frac{\pi}{6}+k\pi, \frac{\pi}{3}+k\pi
\angle B E A_{1}=90$,$\angle A E B_{1}=90 | 90, 90
\frac{37}{4} m | \frac{37m}{4}
\frac{270}7\text{ degrees} | \frac{270}{7}
\frac{270}7\text{ degrees} | \frac{270}{7}^\circ
\frac{270}7\text{ degrees} | \left(\frac{270}{7}\right)^\circ
5,-2 | x = 5, x = -2
5,-2 | x=5\text{ or }x=-2
10^{3},10 | 1000, 10
(-\infty, 0) \cup\{1\}. | \{1\} \cup (-\infty,0)
(-\infty, 2) \cup (3, \infty) | x<2 \text{ or } x>3
(-\infty, 2) \cup (3, \infty) | (3,+\infty)\cup(-\infty,2)
(-\infty, 2) \cup (3, \infty) | x \in (-\infty, 2) \cup (3, \infty)
E_{1},E_{2} | E_2, E_1
m_{\max }=n^{2}-n-1 | n^2-n-1
\sqrt{4 \pi G \rho_{0} r_{0}^{2}} | 2 r_0\sqrt{\pi G\rho_0}
\frac{v_{0}}{r_{0}} \frac{1}{\left(1+r / r_{0}\right)^{3 / 2}} | \frac{v_0}{r_0 (1+r/r_0)^{3/2}}
5 | \boxed{5}
10 | 5\times 2
3.75e9 | 3.75 \times 10^9 \text{ m}
3/8 | \dfrac{3}{8}
-\frac{3}{8} | \frac{-3}{8}
-\frac{3}{8} | -3/8
-\frac{3}{8} | \frac{3}{-8}
12 | \mathbf{12}
12 | {12}
12 | 12\,
12 | \text{12 apples}
073 | 73
\infty | +\infty
\pm 2 | 2, -2
\pm 2 | -2 \text{ or } 2
12:00 | 12:00
5 | \underline{5}
1,3,5 | \{1, 3, 5\}
1,3,5 | 1;3;5
1,3,5 | (1,3,5)
6,31,-1 | (6,31,-1)
(6,31,-1) | 6,31,-1
SRMC=LRMC | LRMC = SRMC
MR=SRMC | SRMC = MR
c=1 | 1
\left(\frac{3}{5},\frac{8}{3}\right] | (0.6, \frac{8}{3}]
\left(\frac{3}{5},\frac{8}{3}\right] | \frac{3}{5} < x \le \frac{8}{3}
352146,362145,452136,562134 | 352146, 362145, 452136, 562134
6764$,$10945 | 6764, 10945
27,54,108 | 27, 54, 108
x^{\prime}+\frac{r}{V} x-r c=0 | x' + \frac{r}{V}x = rc
y^{\prime}+r y-r x(t)=0 | y' = r(x(t)-y)
\lambda_{\text {red}} / \sqrt{2} | \frac{\lambda_{red}}{\sqrt2}
5 | 5\,\mathrm{J}
5 | 5\ \mathrm{m/s^2}
5 | 5 \text{ m/s}^2
5 | 5\mathrm{kg\,m/s^{2}}
3e8 | 3 \times 10^8 \text{ m/s}
3e8 | 3 x 10^8
3e8 | 3\times 10^{8}\ \mathrm{m}\,\mathrm{s}^{-1}
1,3,5 | [1,3,5]
5,-2 | x_1 = -2, x_2 = 5
5,-2 | x=5$ or $x=-2
x<5 | \{x \mid x<5\}
x<5 | \{x | x<5\}
k \ge 2 | \{k \in \mathbb{R} \mid k \ge 2\}
\$36 | 36 dollars
5 | 2+3=5
1 - \frac{1}{e} | 1 - \frac{1}{\mathrm{e}}
3986729 | 3\,986\,729
7425000 | 7 425 000
\lambda_{\text {red}} | \lambda_{\mathrm{red}}
\sqrt{51} | \sqrt{51} \text{ cm}
12\pi | 12\pi \text{ square units}
5 | 5 square units
25 | 25 units^2
even | \text{even}
C | \mathrm{C}
C | \mathbf{C}
C | **C**
C | (C)
C | \textbf{C.}
C | C: 45
2 | +2
2 | --2
2 | 2.000
2 | 02
2 | 2 \,
2 | $2$
2 | \(2\)
2 | \$2
2 | **2**
2 | 2\text{.}
2 | x = 2.
2 | \text{2}
2 | {2}
2 | (2)
2 | \left(2\right)
2 | 2\ \text{units}
2 | \sqrt{4}
2 | 2!
2 | \log_{10} 100
2 | \log_2 4
2 | \ln e^2
2 | e^{\ln 2}
2 | \sin(\pi/2)+1
2 | 4\cos 60^\circ
2 | \binom{2}{1}
2 | \frac{\sqrt{8}}{\sqrt{2}}
2 | |-2|
2 | \lceil 1.5 \rceil
-1 | i^2
-1 | e^{i\pi}
2 | 1.9999999\overline{9}
(2,\infty) | x > 2
(2,\infty) | (2, +\infty)
(2,\infty) | (2, ∞)
(2,\infty) | \{x : x > 2\}
[-1,-\frac{1}{2}] | [-1, -0.5]
(-1,6) | -1 < x < 6
17.5% | 17.5
\frac{1}{2n+2} | \frac{1}{2(n+1)}
$2^{k-n}$ | \frac{2^k}{2^n}
$2^{1009}$ | 2 \cdot 2^{1008}
$2^{1009}$ | 4^{504.5}
$10^{100}$,$10^{1 / 100}$ | 10^{0.01}, 10^{100}
$2^{-2 / 3}$, $8$ | 8, \frac{1}{\sqrt[3]{4}}
\sqrt{53} | \sqrt{53}\approx 7.28
20 | 20 \text{ minutes}
20 | 20 min
20 | 20 \text{ mph}
3R^2 | 3 R^{2}
3,4 | 4, 3
-2,1 | \{-2,1\}
-2,1 | n=-2,1
-2,1 | n = -2 \text{ and } n = 1
E_{1},E_{2} | E_1 \text{ and } E_2
5x - 7y + 11z + 4 = 0 | 10x-14y+22z+8=0
120^\circ | 120
120^\circ | 120\,^{\circ}
120^\circ | 120\degree
336^\circ | 336 \text{ degrees}
\frac{2016}{2017^{2}} | \frac{2016}{4068289}
1024-256 \pi | 256(4-\pi)
\frac{189 \sqrt{11}}{11} | \frac{189}{\sqrt{11}}
$41352,42351,51342$ | 41352, 42351, 51342
f(x)=x,f(x)=-x | f(x)=\pm x
f(x)=x,f(x)=-x | f(x) = -x \text{ or } f(x)=x
$f(x)=\frac{1}{x}$ | 1/x
$x_{1}=2$ | 2
np.arcsin(10/13) | \arcsin \frac{10}{13}
np.arcsin(10/13) | arcsin(10/13)
\arcsin{1.3 \sin{\theta_w}} | \arcsin(1.3\sin\theta_w)
\arcsin{1.3 \sin{\theta_w}} | \sin^{-1}(1.3 \sin(\theta_w))
2.2 \tau | 2.2\tau
\alpha | \alpha
m_{p} c^{2}\left(\gamma^{2}-1\right) \sin ^{2} \theta | m_p c^2 (\gamma^2 - 1) \sin^2 \theta
m_{p} c^{2}\left(\gamma^{2}-1\right) \sin ^{2} \theta | m_p c^2 (\gamma^2 - 1) \sin^2(\theta)
c x^{-2}-\frac{\cos (2 x)}{2 x^{2}} | \frac{2c - \cos 2x}{2x^2}
m g \sin \theta | mg\sin\theta
t^{10} | t^10
"""
DIFFERENT = r"""
1\frac12 | \frac12
\text{yes} | no
\mathbb{R} | \mathbb{Z}
(0,1) | 1,0
[1,2] | 1,2
5 | -5
5 | 5x
5 | 5 or 6
1 | 1 or 2
1 | 1, 2
1,2 | 1
1,2 | 1.2
0 | I(0)
0.333 | 1/3
1/3 | 0.333
1/3 | 0.3333333333333
0 | 1e-7
1e-7 | 0
9007199254740992 | 9007199254740993
x | y
n | N
f(x)=2x | f(n)=2n
k=3 | m=3
(1,2) | (2,1)
(1,2) | [1,2]
[1,2] | [1,2)
[1,2) | (1,2]
(1,2) | \{1,2,3\}
x<5 | x\le 5
x<5 | x>5
x<5 | 5
\neq 5 | 5
204_5 | 204_6
204_5 | 54
204_5 | 204
204_5 | 54_{10}
54 | 204_5
5\text{ m} | 5 \text{ cm}
15\text{ cm}^2 | 15\text{ cm}
\text{east} | seat
\text{east} | west
\text{even} | odd
C | D
C | B
C | C or D
C | A, C
C | CD
C | c + d
C | not C
C | A. or C.
12:00 | 1:00
12:00 | 12
7:32 | 32:7
\frac{2}{3} | \frac{3}{2}
\sqrt{2} | 1.41421356
\sqrt{2} | 1.4142135623730950488016887242096980785696718753769480731766797379907324784621
\pi | 3.14159
\pi | 22/7
20\% | 2000\%
20 | 0.2
\lfloor x\rfloor | x
|x| | x
x | \sqrt{x^2}
5x+3=0 | 5x+3
a+3z=0 | 0
1 \pm \sqrt{19} | 1+\sqrt{19}
1 \pm \sqrt{19} | 1 \pm \sqrt{18}
10^{100} | 10^{101}
2^{1009} | 2^{1010}
9^{9^{9}} | 9^{9^{9}}+1
-2,-2 | -2
-2,-2 | 2,-2
2x | 2
2x | x^2
AB | 12
(3,331) | 3331
3331 | (3,331)
f(x)=x | x=x
\text{Navin} | Navi
1 | 1?
1 | \text{not } 1
1 | 1 and maybe 2
1 | 1 (or 2)
1 | \{1,2\}
1 | >1
1 | <1
1 | \approx 1.1
1 | 1 \neq 2
3 | 3!
6 | \text{6 or 7}
0 | \emptyset
10 | 1010_2
(0,1) | 0<x\le1
\frac{37}{4} m | \frac{37}{4}
6m | 6
1+2i | 1+2j
1+2i | 1-2i
1+2i | 3
y=2x+3 | y=2x
y=2x+3 | x=2y+3
MR=SRMC | SRMC
E_{1},E_{2} | E_{1},E_{3}
I(0) | I(1)
x_0 | x_1
x_0 | 0
\sin x | \cos x
\sin x | \sin y
1,234 | 1.234
1.234 | 1,234
0.05 | 5
\$36 | 36 cents
90^\circ | 90\%
5 | 5 where n=2
2 | 5 where n=2
6 | 5=6
C | C. D
C | C) or D)
5 | 5 mod 7
1,2 | [1,2]
\text{even} | even or odd
\text{even} | \text{even or odd}
\text{even} | not even
\text{east} | east-west
\text{Navin} | Navin, Evelyn
C | C/D
C | \text{C or D}
C | C, D
C | (C) (D)
C | A B C D
2 | 2 \\ 3
2 | 2; 3
2 | 2 / 3
2 | \{2\} \cup \{3\}
2 | 2 \text{ or maybe } 3
2 | 2 \lor 3
2 | 2 | 3
2 | 2, \text{ but possibly } 3
2 | [2,3]
2 | 2 \text{ to } 3
2 | 2-3
2 | 2 ... 3
2 | 2 \ldots
2 | \text{either } 2 \text{ or } 3
2 | 2 \to 3
2 | x=2, y=3
2 | x \neq 2
2 | |x|=2
2 | x^2 = 4
2 | 2 \pm 0.1
2 | 2 \pm 0
2 | 1.999999999999999999999999
(2,\infty) | [2,\infty)
(2,\infty) | (-\infty,2)
(-1,6) | -1 \le x \le 6
17.5% | 1.75
3R^2 | 3r^2
5x - 7y + 11z + 4 = 0 | 5x-7y+11z-4=0
120^\circ | 120\pi
120^\circ | \frac{2\pi}{3}
np.arcsin(10/13) | \arccos(10/13)
\alpha | \beta
"""


def split_pairs(block):
  """Lists [truth, answer]."""
  return [line.split(' | ', 1) for line in block.strip().splitlines()]
