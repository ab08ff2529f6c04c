// Consumes the queue QUEUE at AMQP_URL until it is ended.
//
// Prints "ready", and then each message as one JSON object a line: properties, headers, and the body's text.

import amqp from "amqplib";

const connection = await amqp.connect(process.env.AMQP_URL);
const channel = await connection.createChannel();

await channel.consume(process.env.QUEUE, (message) => {
  const { messageId, type, contentType, appId, deliveryMode, timestamp, headers } = message.properties;
  console.log(
    JSON.stringify({
      message_id: messageId,
      type,
      content_type: contentType,
      app_id: appId,
      delivery_mode: deliveryMode,
      timestamp,
      routing_key: message.fields.routingKey,
      headers,
      // Its text. JSON.parse would round the numbers beyond 2^53.
      body: message.content.toString(),
    }),
  );
  channel.ack(message);
});
console.log("ready");
