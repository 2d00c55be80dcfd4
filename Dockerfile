# Never built: written and linted where no container engine and no network was at hand.
# For CPUs: docker build -t stratagem . && docker run --rm stratagem
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
# torch for CPUs: the one on PyPI brings gigabytes of CUDA.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PATH=/stratagem/.venv/bin:$PATH
WORKDIR /stratagem
COPY . .
RUN make .venv/.installed
CMD ["stratagem", "doctor"]
