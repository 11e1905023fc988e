# Hardy on a CPU: the command line, and the server or a node of a deployment on Flower.
#   docker build -t hardy .
#   docker run --rm -v "$PWD/runs:/home/hardy/runs" hardy run demo
#   docker run --rm -v "$PWD/keys/node-0:/keys:ro" -v "$PWD/state:/state" -v "$PWD/site:/data:ro" hardy \
#       deploy node /keys --server server.example.org:9092 --app /data/hardy-app.fab --state /state
FROM python:3.12-slim
# set to an index of CPU builds of torch to keep the image small: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt '.[images,export,flower]' && rm -rf /src
RUN useradd --create-home hardy
USER hardy
WORKDIR /home/hardy
ENTRYPOINT ["hardy"]
CMD ["--help"]
